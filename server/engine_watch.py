"""How the engines of working runs are: asked in the background, and only while somebody looks."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import httpx

from forebay.core.addresses import without_login
from forebay.core.errors import EngineUnavailable, ForebayError
from forebay.core.run import Run
from forebay.core.tasks import TaskSet
from forebay.engines import weight_updates
from forebay.engines.router_workers import WorkerAdmin, admin_client
from forebay.server.engine_pauses import RunEngines

ASKED_EVERY_S = 5.0
ANSWER_S = 2.0
"""Seconds that an engine has to answer."""
MAX_RUNS = 10


class EngineWatch:
    """The engines' last answers. A caller gets those that are known, and lets new ones be asked for."""

    def __init__(self) -> None:
        self._tasks = TaskSet()
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._asked_s: dict[str, float] = {}

    def rows(self, runs: Sequence[Run]) -> list[dict[str, Any]]:
        """A row for each worker of the first of these runs that work; empty until they were asked."""
        working, now_s = [run for run in runs if not run.has_ended][:MAX_RUNS], time.monotonic()
        for run in working:
            if now_s - self._asked_s.get(run.run_id, -ASKED_EVERY_S) >= ASKED_EVERY_S:
                self._asked_s[run.run_id] = now_s
                self._tasks.start(self._ask(run))
        return [row for run in working for row in self._rows.get(run.run_id, ())]

    async def _ask(self, run: Run) -> None:
        self._rows[run.run_id] = await _workers_of(run)


def silent_in(rows: Sequence[dict[str, Any]]) -> set[str]:
    """Addresses of the engines that do not answer."""
    return {row["url"] for row in rows if not row["answers"]}


async def _workers_of(run: Run) -> list[dict[str, Any]]:
    try:
        engines = RunEngines.of(run)
    except ForebayError:  # it names none
        return []
    async with admin_client(engines.api_key, ANSWER_S) as http:
        found = await asyncio.gather(*(_behind(http, url) for url in engines.urls))
    return [{"run_id": run.run_id, **row, "url": without_login(row["url"])} for rows in found for row in rows]


async def _behind(http: httpx.AsyncClient, url: str) -> list[dict[str, Any]]:
    """The workers behind one address; one row for an engine that is silent, or cannot be asked."""
    try:
        async with asyncio.timeout(ANSWER_S):
            views = await asyncio.gather(*map(worker_view, await weight_updates.workers_of(http, [url])))
        return [{**view, "answers": True} for view in views]
    except (EngineUnavailable, TimeoutError):
        return [{"url": url, "answers": False}]
    except ForebayError:  # it answers, but has no such routes
        return [{"url": url, "answers": True}]


async def worker_view(worker: WorkerAdmin) -> dict[str, Any]:
    """What a worker says of its weights and its load. Raises ``EngineError`` and ``TimeoutError``."""
    info, load = await worker.model_info(), await worker.load()
    return {
        "url": worker.url,
        "weight_version": info.weight_version if info else None,
        "model_path": info.model_path if info else None,
        "num_running": load.running if load else None,
        "num_waiting": load.waiting if load else None,
    }
