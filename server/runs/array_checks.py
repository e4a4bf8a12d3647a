"""Checks whether a run can get the arrays per token that its start asks for."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from forebay.core.errors import EngineError, InvalidInput
from forebay.core.fields import read_flag
from forebay.core.starts.asked_arrays import MAX_KEPT, AskedArrays
from forebay.engines.detect import DetectedEngine
from forebay.engines.router_workers import WorkerAdmin, admin_client
from forebay.engines.sglang import SGLangEngine
from forebay.generators.discovery.info import GeneratorInfo

ENGINE_WAIT_S = 3.0
"""Time limit for asking the engines how they were started; those that do not answer are not checked."""
OTHER_KIND = "returns no arrays per token: use SGLang"
HIDDEN = "is a router that drops what arrays need: make its workers reachable, or name them in remote_engine_url"
NO_ROUTES = "returns no routed experts: start it with --enable-return-routed-experts"
STALE_ROUTES = (
    "may return routed experts of other tokens: start it without --enable-hierarchical-cache, which does not keep them"
)


def check_arrays(asked: AskedArrays, payload: Mapping[str, Any], generator: GeneratorInfo) -> None:
    """Raise ``InvalidInput`` if no call would return arrays, or if calls for sampling masks would be rejected."""
    is_captured = payload.get("capture") is None or read_flag("capture", payload["capture"])
    # The gateway keeps the turns of other generators in memory, where arrays would take too much.
    if asked and not (generator.imports_base and is_captured):
        raise InvalidInput(
            "arrays needs a generator that uses Forebay's base, and whose calls are recorded",
            hint="derive from BaseGenerator and leave out capture, or write arrays with your samples",
            field="arrays",
        )
    params = payload.get("sampling_params")
    params = params if isinstance(params, Mapping) else {}
    extra = params.get("extra_body")
    top_k = str((extra if isinstance(extra, Mapping) else params).get("top_k", params.get("top_k")))
    if asked.sampling_mask and not (top_k.isascii() and top_k.isdigit() and 1 < int(top_k) <= MAX_KEPT):
        raise InvalidInput(
            f"sampling_params.top_k must be from 2 to {MAX_KEPT} if arrays has sampling_mask (got {top_k:.100})",
            hint="SGLang returns no mask for top_p alone: forebay start … --set sampling_params.top_k=100",
            field="sampling_params.top_k",
        )


async def array_warnings(asked: AskedArrays, urls: Sequence[str], api_key: str | None) -> list[str]:
    """Warnings about engines that answer, but will not return what is asked for."""
    found = defaultdict[str, list[str]](list)
    for problems in await asyncio.gather(*(_problems(url, api_key, asked) for url in urls if asked)):
        for url, what in problems:
            found[what].append(url)
    return [
        f"arrays: engine {named[0]} {f'(and {len(named) - 1} more) ' * (len(named) > 1)}{what}"
        for what, named in found.items()
    ]


async def _problems(url: str, api_key: str | None, asked: AskedArrays) -> list[tuple[str, str]]:
    try:
        async with (
            asyncio.timeout(ENGINE_WAIT_S),
            DetectedEngine(url, api_key=api_key) as detected,
            admin_client(api_key) as http,
        ):
            engine = await detected.found()
            if not isinstance(engine, SGLangEngine):
                return [(url, OTHER_KIND)]
            workers = await engine.workers()
            asking = (WorkerAdmin(http, worker).server_info() for worker in workers)
            infos = await asyncio.gather(*asking, return_exceptions=True)
    except (EngineError, TimeoutError):
        return []
    known = [(worker, info) for worker, info in zip(workers, infos, strict=True) if isinstance(info, dict)]
    if engine.is_through_router or (workers != [engine.url] and not known):
        return [(url, HIDDEN)]
    if not asked.routed_experts:
        return []
    lacking = [(worker, NO_ROUTES) for worker, info in known if not info.get("enable_return_routed_experts")]
    return lacking + [(worker, STALE_ROUTES) for worker, info in known if info.get("enable_hierarchical_cache")]
