"""What an engine takes for the sampling parameters that a call leaves out, as far as its server tells."""

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
"""SGLang before it may have had a version of transformers that takes ``top_k`` 50 where a model says nothing."""
GENERATION_CONFIG = "generation_config.json"
ALWAYS_HELD = frozenset({"glm47", "inkling", "kimi_k3"})
"""Tool parsers of SGLang that hold every call of a tool to a grammar, also one that the model need not make."""


async def engine_defaults(http: httpx.AsyncClient, url: str) -> EngineDefaults | None:
    """The defaults of the SGLang server at ``url``; None if it did not answer, and should be asked again.

    A chat takes its defaults from the model's folder, unless the server was started with ``--sampling-defaults
    openai``: they are known if that folder can be read here as well. ``/generate`` takes them from
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
    # Without a parser SGLang makes a grammar of tools only where a call of one is required.
    if not parser:
        return "never"
    return "always" if str(parser) in ALWAYS_HELD else "strict"


def _of_chats(info: Mapping[str, Any]) -> Mapping[str, Any]:
    if info["sampling_defaults"] == "openai":
        return {}
    folder = Path(str(info.get("model_path") or ""))
    # Without a folder of that name it is one of another machine, or a name at a hub. ``Path.is_file`` would raise where
    # the folder may not be looked into, such as one of root's.
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
