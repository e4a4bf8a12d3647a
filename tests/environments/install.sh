#!/bin/bash
# Install the real verifiers and Harbor, and the client of Phoenix, into a virtual environment of their own, as users do.
# usage: install.sh VENV
without_torch=1
. "$(dirname "$0")/../make_venv.sh"

# verifiers runs its agents with uv, which is there already.
pip verifiers==0.4.0 harbor==0.25.0 arize-phoenix-client==3.5.0 msgspec==0.22.0
