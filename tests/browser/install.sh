#!/bin/bash
# Install a wheel with what the server and its charts need, and nothing else, into a virtual environment of its own.
# usage: install.sh VENV WHEEL
set -euo pipefail
# What an earlier wheel needed would hide that this one does not ask for it.
rm -rf "$1"
without_torch=1
. "$(dirname "$0")/../make_venv.sh"

pip --constraint "$(dirname "$0")/../../constraints.txt" "$2[server,report]"
