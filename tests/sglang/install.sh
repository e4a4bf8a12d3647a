#!/bin/bash
# Install the real SGLang engine for a machine without a GPU, and its router, into a virtual environment of their own.
# usage: install.sh VENV
. "$(dirname "$0")/../make_venv.sh"

pip aiohttp anthropic apache-tvm-ffi==0.1.11 cloudpickle dill distro einops fastapi gguf httpx interegular ipython jsonschema \
  "llguidance>=1.7.6,<2" loguru msgspec numpy openai==2.8.0 openai-harmony==0.0.4 orjson packaging partial_json_parser pillow \
  prometheus-client psutil pybase64 pydantic "python-dateutil<3" python-multipart pyzmq regex requests scipy \
  sentencepiece==0.2.1 setproctitle soundfile==0.13.1 tiktoken tokenizers==0.23.2 tqdm transformers==5.19.0 triton uvloop \
  "uvicorn>=0.51" watchfiles xxhash zstandard
# Without their dependencies, which ask for CUDA wheels of several gigabytes.
pip --no-deps compressed-tensors==0.18.0 sglang==0.5.23 sglang-router==0.3.2 torchvision==0.28.0 xgrammar==0.2.7
