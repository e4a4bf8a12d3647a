"""Find out an engine's defaults for sampling parameters that a call omits, as far as the server reports them."""

import asyncio
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
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


async def engine_defaults(http: httpx.AsyncClient, url: str) -> EngineDefaults | None:
    """Return the defaults of the SGLang server at ``url``; None if it did not answer and should be asked again.

    Defaults of chats come from the model's folder, unless the server was started with ``--sampling-defaults openai``.
    They are known only if the folder is readable here. Defaults of ``/generate`` come from
    ``--preferred-sampling-params``.
    """
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            info = await WorkerAdmin(http, url).server_info()
    except (EngineUnavailable, TimeoutError):
        return None
    except EngineError:
        return UNKNOWN_DEFAULTS
    if info is None or "sampling_defaults" not in info:
        return UNKNOWN_DEFAULTS
    return EngineDefaults(
        chat=await asyncio.to_thread(_of_chats, info),
        generate=_of_generate(info.get("preferred_sampling_params")),
        tool_grammar=_tool_grammar(info.get("tool_call_parser")),
    )


def _tool_grammar(parser: object) -> Any:
    # Without a parser SGLang uses a grammar for tools only if a tool call is required.
    if not parser:
        return "never"
    return "always" if str(parser) in ALWAYS_HELD else "strict"


def _of_chats(info: Mapping[str, Any]) -> Mapping[str, Any]:
    if info["sampling_defaults"] == "openai":
        return {}
    folder = Path(str(info.get("model_path") or ""))
    # A missing folder belongs to another machine, or is a name on a model hub. `Path.is_file` would raise for a folder
    # without read permission.
    if info["sampling_defaults"] != "model" or not os.path.isfile(folder / "config.json"):
        return UNKNOWN_DEFAULTS.chat
    try:
        given = msgspec.json.decode((folder / GENERATION_CONFIG).read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (OSError, *UNREADABLE):
        return UNKNOWN_DEFAULTS.chat
    known = {name: given[name] for name in OF_THE_MODEL if given.get(name) is not None}
    return known if _version(info.get("version")) >= CHECKED_VERSION else {"top_k": None, **known}


def _of_generate(preferred: object) -> Mapping[str, Any]:
    if preferred is None:
        return {}
    if not isinstance(preferred, dict):
        return UNKNOWN_DEFAULTS.generate
    return {ALIASES.get(name, name): preferred[name] for name in map(str, preferred)}


def _version(text: object) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", str(text or ""))[:3]))
