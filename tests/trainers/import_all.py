"""Import Forebay's client and the trainers' packages into one process."""

import json

import tinker
import transfer_queue
import trl
import verl

import forebay.client

assert all((tinker, transfer_queue, trl, verl))
print(json.dumps({"client": forebay.client.__file__}))
