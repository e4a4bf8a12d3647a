#!/bin/bash
# Install the real TRL, verl and tinker, for a machine without a GPU, beside Forebay's client into an environment of
# their own.
# usage: install.sh VENV
. "$(dirname "$0")/../make_venv.sh"

pip trl==1.16.0 verl==0.9.1 TransferQueue==0.1.11 tinker==0.38.0 duckdb==2.0.1 'ray>=2.60' 'httpx>=0.28' 'msgspec>=0.22'
# verl imports these without asking for them, except in its extra `verl-core`, which wants packages for GPUs as well.
pip 'cachetools>=8' 'fastapi>=0.165' 'uvicorn>=0.54'
pip --no-deps --editable "$(dirname "$0")/../.."
