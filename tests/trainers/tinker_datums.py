"""Reads a batch of a run, and prints its datums; of each input, what Tinker would be sent."""

import json
import sys

import tinker

from forebay.client import BufferClient
from forebay.client.tinker import datums


def main(url: str, run_id: str, num_groups: int, loss_fn: str | None, as_tensors: bool) -> None:
    with BufferClient(url, as_tensors=as_tensors) as client:
        client.attach(run_id)
        batch = client.read(num_groups, wait_s=20)
        assert batch is not None
        made, unusable = datums(batch, loss_fn)
    assert all(isinstance(datum, tinker.Datum) for datum in made)
    values = [{name: data.tolist() for name, data in datum.loss_fn_inputs.items()} for datum in made]
    types = {name: data.dtype for datum in made for name, data in datum.loss_fn_inputs.items()}
    inputs = [datum.model_input.to_ints() for datum in made]
    rewards = [[row["uid"], row["reward"]] for row in batch.rows]
    passed = [[group.instance_id, group.reason] for group in unusable]
    print(json.dumps({"inputs": inputs, "values": values, "types": types, "rewards": rewards, "passed": passed}))


main(**json.loads(sys.argv[1]))
