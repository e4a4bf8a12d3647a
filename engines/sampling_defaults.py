"""Find out an engine's defaults for sampling parameters that a call omits, as far as the server reports them."""

import asyncio
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from forebay.core.errors import EngineError, EngineUnavailable
from forebay.engines.capture.sampling_params import ALIASES, OF_THE_MODEL, UNKNOWN_DEFAULTS, EngineDefaults
from forebay.engines.read_json import UNREADABLE
from forebay.engines.router_workers import WorkerAdmin

ASK_TIMEOUT_S = 3.0
CHECKED_VERSION = (0, 5, 23)
"""Earlier SGLang may use a version of transformers that defaults to ``top_k`` 50 if the model does not set it."""
GENERATION_CONFIG = "generation_config.json"
ALWAYS_HELD = frozenset({"glm47", "inkling", "kimi_k3"})
"""SGLang tool parsers that constrain every tool call to a grammar, even an optional one."""
UNKNOWN_VLLM = msgspec.structs.replace(UNKNOWN_DEFAULTS, logprobs=None)
LOGPROBS: Mapping[str, Literal["", "raw"]] = {"raw_logprobs": "raw", "processed_logprobs": ""}
"""Kinds of logprobs by vLLM's ``--logprobs-mode``; its other modes return no logprobs."""


class _ModelConfig(msgspec.Struct):
    model: str
    generation_config: str
    logprobs_mode: str
    override_generation_config: dict[str, Any] = {}


async def reported(
    admin: WorkerAdmin, read: Callable[[Mapping[str, Any]], EngineDefaults], unknown: EngineDefaults
) -> EngineDefaults | None:
    """Return the defaults that a server reports; None if it did not answer and should be asked again."""
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            info = await admin.server_info()
    except (EngineUnavailable, TimeoutError):
        return None
    except EngineError:
        return unknown
    return unknown if info is None else await asyncio.to_thread(read, info)


def sglang_defaults(info: Mapping[str, Any]) -> EngineDefaults:
    """Read the start options of SGLang.

    Defaults of chats come from the model's folder, unless the server was started with ``--sampling-defaults openai``.
    They are known only if the folder is readable here. Defaults of ``/generate`` come from
    ``--preferred-sampling-params``.
    """
    if "sampling_defaults" not in info:
        return UNKNOWN_DEFAULTS
    return EngineDefaults(
        chat=_of_chats(info),
        generate=_of_generate(info.get("preferred_sampling_params")),
        tool_grammar=_tool_grammar(info.get("tool_call_parser")),
    )


def vllm_defaults(info: Mapping[str, Any]) -> EngineDefaults:
    """Read the start options of vLLM, which reports them under ``VLLM_SERVER_DEV_MODE=1`` alone."""
    try:
        config = msgspec.convert(info["vllm_config"]["model_config"], _ModelConfig)
    except (LookupError, TypeError, *UNREADABLE):
        return UNKNOWN_VLLM
    source = config.model if config.generation_config == "auto" else config.generation_config
    given = {} if config.generation_config == "vllm" else _of_folder(source)
    overridden = {name: value for name, value in config.override_generation_config.items() if name in OF_THE_MODEL}
    chat = UNKNOWN_DEFAULTS.chat if given is None else given
    return EngineDefaults(chat={**chat, **overridden}, generate={}, logprobs=LOGPROBS.get(config.logprobs_mode))


def _tool_grammar(parser: object) -> Any:
    # Without a parser SGLang uses a grammar for tools only if a tool call is required.
    if not parser:
        return "never"
    return "always" if str(parser) in ALWAYS_HELD else "strict"


def _of_chats(info: Mapping[str, Any]) -> Mapping[str, Any]:
    if info["sampling_defaults"] == "openai":
        return {}
    known = _of_folder(str(info.get("model_path") or "")) if info["sampling_defaults"] == "model" else None
    if known is None:
        return UNKNOWN_DEFAULTS.chat
    return known if _version(info.get("version")) >= CHECKED_VERSION else {"top_k": None, **known}


def _of_folder(path: str) -> Mapping[str, Any] | None:
    """Return what a model's folder sets; None if it cannot be read here."""
    folder = Path(path)
    # A missing folder belongs to another machine, or is a name on a model hub. `Path.is_file` would raise for a folder
    # without read permission.
    if not os.path.isfile(folder / "config.json"):
        return None
    try:
        given = msgspec.json.decode((folder / GENERATION_CONFIG).read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, *UNREADABLE):
        return None
    return {name: given[name] for name in OF_THE_MODEL if given.get(name) is not None}


def _of_generate(preferred: object) -> Mapping[str, Any]:
    if preferred is None:
        return {}
    if not isinstance(preferred, dict):
        return UNKNOWN_DEFAULTS.generate
    return {ALIASES.get(name, name): preferred[name] for name in map(str, preferred)}


def _version(text: object) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", str(text or ""))[:3]))
