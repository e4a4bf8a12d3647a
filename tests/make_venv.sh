# Makes the virtual environment $1 with torch for the CPU (unless without_torch is set), and defines `pip` for it.
# install.sh of each folder sources it.
set -euo pipefail
venv=$1

"${PYTHON:-python3}" -m venv "$venv"
# A wheel that depends on torch must not replace the one installed first.
echo "torch==2.13.0" > "$venv/constraints.txt"
export PIP_CONSTRAINT="$venv/constraints.txt"
export UV_CONSTRAINT="$PIP_CONSTRAINT"
"$venv/bin/python" -m pip install --quiet uv==0.13.9
# uv installs in a fifth of the time of pip. Like pip, it trusts the machine's certificates and waits for a slow index.
export UV_SYSTEM_CERTS=1 UV_HTTP_TIMEOUT=180
pip() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@"; }

# By pip: uv would take a build for GPUs.
if [ -z "${without_torch:-}" ]; then "$venv/bin/python" -m pip install --quiet torch==2.13.0; fi
