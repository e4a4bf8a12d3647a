"""Administrative calls to a vLLM server. Checked against vLLM 0.32, and the source of 0.33.

Pauses and weights need ``VLLM_SERVER_DEV_MODE=1`` in the server's environment; aborts need that or
``--enable-scale-out``.
"""

import re
from collections import Counter
from http import HTTPStatus
from typing import Any

from forebay.core.errors import EngineError, InvalidInput
from forebay.core.weight_versions import PauseMode
from forebay.engines.abc import EngineLoad, ModelInfo
from forebay.engines.router_workers import NOT_SUPPORTED, WorkerAdmin

ABORT_PATHS = ("/inference/v1/abort_requests", "/abort_requests")
_GAUGE = re.compile(rb"^vllm:num_requests_(running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)\s*$", re.MULTILINE)


class VLLMAdmin(WorkerAdmin):
    """Calls to the vLLM server at ``url``. Raises as ``WorkerAdmin`` does."""

    absent = NOT_SUPPORTED | {HTTPStatus.FORBIDDEN}
    """Statuses of routes that are not enabled."""
    requirement = "this needs vLLM 0.32 or later with VLLM_SERVER_DEV_MODE=1 in its environment"
    is_idle_once_paused = True

    async def abort(self, rid: str) -> bool:
        # vLLM aborts by exact id: of a chat, of a text completion, or of a chat that is continued.
        body = {"request_ids": [f"chatcmpl-{rid}", f"cmpl-{rid}-0", f"generate-tokens-{rid}"]}
        for path in ABORT_PATHS:
            if await self._is_done(path, body):
                return True
        return False

    async def abort_all(self) -> bool:
        return await self._is_done(ABORT_PATHS[-1], {})

    async def load(self) -> EngineLoad | None:
        reply, gauges = await self._known("GET", "/metrics"), Counter[bytes]()
        for name, value in _GAUGE.findall(b"" if reply is None else reply.content):  # of each data-parallel engine
            gauges[name] += int(float(value))
        return EngineLoad(gauges[b"running"], gauges[b"waiting"]) if len(gauges) == 2 else None

    async def model_info(self) -> ModelInfo | None:
        return ModelInfo(model=await self.first_model(), weight_version=await self.weight_version())

    async def weight_version(self) -> str | None:
        version = (await self._json("/weight_info") or {}).get("weight_version")
        return None if version is None else str(version)

    async def server_info(self) -> dict[str, Any] | None:
        return await self._json("/server_info?config_format=json")

    async def check_pauses(self) -> None:
        if not await self.answers("/is_paused"):
            raise InvalidInput(f"{self.url} cannot be paused", hint=self.requirement, field="mode")

    async def pause(self, mode: PauseMode) -> None:
        if mode == "retract":
            hint = "use the mode abort or in_place"
            raise InvalidInput(f"mode must not be retract: {self.url} is a vLLM server", hint=hint, field="mode")
        await self._must("/pause?mode=keep&clear_cache=false" if mode == "in_place" else "/pause?mode=abort", {})

    async def resume(self) -> None:
        await self._must("/resume", {})

    async def flush_cache(self) -> None:
        reply = await self.post_json("/reset_prefix_cache", {})
        if reply is not None and not reply.get("success"):
            raise EngineError(f"{self.url} did not clear its cache", hint="no call may be in flight")

    async def update_weights(self, model_path: str, version: str, *, flushes_cache: bool) -> None:
        await self._must("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": model_path}})
        if flushes_cache:
            await self.flush_cache()
        await self.set_weight_version(version)

    async def set_weight_version(self, version: str) -> None:
        await self._must("/update_weight_version", {"new_version": version})
