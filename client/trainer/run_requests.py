"""The requests of a trainer about a run and its engines, as flows."""

from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from forebay.client.calls.flow import CALL_TIMEOUT_S, PAGE_RUNS, Flow, Json, answered, decoded, json_call
from forebay.client.model import BatchLike, EnginePause, Evaluation, RunStats, WeightUpdate, batch_ids
from forebay.core.errors import InvalidInput
from forebay.core.weight_versions import PauseMode

REPLY_TIMEOUT_S = 60.0
UPDATE_TIMEOUT_S = 900.0
PAUSE_TIMEOUT_S = 120.0
PAUSE_LIMIT_S = 600.0


class RunRequests:
    """Requests to a server, most of them about the run to which the client is attached."""

    def __init__(self, retry_for_s: float) -> None:
        self._retry_for_s = retry_for_s
        self.run_id = ""

    def runs(self, name: str | None = None) -> Flow[list[RunStats]]:
        """Every run of the server, or every run with this ``name``, oldest first."""
        query: Json = {"limit": PAGE_RUNS} | ({} if name is None else {"name": name})
        found: list[Json] = []
        while True:
            page = (yield from self._ask("GET", f"v1/runs?{urlencode(query)}"))["runs"]
            found += page
            if len(page) < PAGE_RUNS:
                return msgspec.convert(found[::-1], list[RunStats])
            query["before"] = page[-1]["run_id"]

    def stats(self) -> Flow[RunStats]:
        """The state and the statistics of the run."""
        return msgspec.convert((yield from self._ask("GET", self._path())), RunStats)

    def stop(self) -> Flow[RunStats]:
        """Stop the run's process. Its data is kept, and completed groups can still be read."""
        return msgspec.convert((yield from self._ask("POST", self._path("stop"), {})), RunStats)

    def evaluate(self, task: str, step: int) -> Flow[Evaluation]:
        """Start to evaluate the engines' current weights, beside the training; ``stats().evaluations`` has the result.

        ``task`` is a name in the ``evaluate.tasks`` of the run's start; ``step`` has a checkpoint or a batch. Repeating
        the call returns the same evaluation, unless it failed or was stopped. Raises ``InvalidInput``, ``RunEnded``.
        """
        body = {"task": task, "step": step}
        return msgspec.convert(
            (yield from self._ask("POST", self._path("evaluations"), body, REPLY_TIMEOUT_S)), Evaluation
        )

    # --- weights

    def set_weight_version(self, version: int) -> Flow[None]:
        """Announce the version of the weights in the engines (0 or more). Staleness is counted from it."""
        yield from self._ask("PUT", self._path("weight_version"), {"weight_version": version})

    def update_weights(
        self,
        version: int,
        model_path: str | Path,
        mode: PauseMode = "abort",
        *,
        timeout_s: float = UPDATE_TIMEOUT_S,
    ) -> Flow[WeightUpdate]:
        """Load the weights in ``model_path``, a path on each engine's machine, into every engine; announce ``version``.

        The engines are paused meanwhile. ``mode`` decides what happens to calls in flight. With "abort" they end, and
        the base generator continues them from their tokens. With "retract" the engine continues them and recomputes
        their cache under the new weights. With "in_place" they continue with the old cache, which is fastest, but
        their logprobs belong to no single policy.

        Raises ``WeightUpdateFailed``, which names the engine and quotes its reply, and ``EnginesPaused``.
        """
        body = {"weight_version": version, "model_path": str(model_path), "mode": mode}
        reply = yield from self._ask("PUT", self._path("weight_version"), body, timeout_s)
        return msgspec.convert(reply, WeightUpdate)

    def pause_engines(self, mode: PauseMode, limit_s: float) -> Flow[EnginePause]:
        """Pause the engines."""
        body = {"mode": mode, "limit_s": limit_s}
        reply = yield from self._ask("POST", self._path("engines/pause"), body, PAUSE_TIMEOUT_S)
        return msgspec.convert(reply, EnginePause)

    def continue_engines(self, version: int | None) -> Flow[None]:
        """Resume the engines, and announce the version of their weights, if one is given."""
        body = {} if version is None else {"weight_version": version}
        yield from self._ask("POST", self._path("engines/continue"), body, REPLY_TIMEOUT_S)

    # --- asking

    def _path(self, rest: str = "") -> str:
        if not self.run_id:
            hint = "call start() or attach(run_id) first"
            raise InvalidInput("this client is not attached to a run", hint=hint, field="run_id")
        return f"v1/runs/{self.run_id}/{rest}".rstrip("/")

    def _batch_path(self, batch: BatchLike) -> str:
        return self._path(f"batches/{batch_ids(batch)[0]}")

    def _ask(
        self, method: str, path: str, body: Json | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> Flow[dict[str, Any]]:
        call = json_call(method, path, body, timeout_s)
        return decoded((yield from answered(call, self._retry_for_s)), call)
