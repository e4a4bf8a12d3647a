"""A buffer that speaks the wire of run processes, over real HTTP, and does what a test tells it to."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.core.binary_sample import SAMPLES_TYPE, as_json, split_samples
from forebay.core.parts import is_part_frame, read_part_frame
from forebay.core.waiting import Signal
from forebay.web.serving import serve_app
from tests.workers.workers_kit import run_over_workers

Sample = dict[str, Any]


def _decoded(body: bytes, content_type: str) -> list[Sample]:
    if content_type != SAMPLES_TYPE:
        samples: list[Sample] = json.loads(body)
        return samples
    return [json.loads(as_json(frame)) for frame in split_samples(body) if not is_part_frame(frame)]


class FakeBuffer:
    """``samples`` and ``progress`` hold what arrived; ``answers`` are statuses to give before the true ones."""

    def __init__(self) -> None:
        self.url = ""
        self.root_url = ""
        self.plan: dict[str, Any] = {
            "run_id": "run-0123456789ab",
            "group_size": 2,
            "group_timeout_seconds": 300,
            "group_deadline_seconds": 3600,
            "closed": [],
            "taken": [],
            "is_resumed": False,
        }
        self.samples: list[Sample] = []
        self.parts: dict[str, bytes] = {}
        """By digest."""
        self.batch_sizes: list[int] = []
        self.content_types: list[str] = []
        self.progress: list[dict[str, Any]] = []
        self.answers: list[Response] = []
        self.refused: Callable[[Sample], dict[str, Any] | None] = lambda _: None
        self.is_gone = False
        self.is_stopped = False
        self.is_paused = False
        """Its engines stand still."""
        self.knows_paused = False
        """The run has heard that they do."""
        self.closed: list[dict[str, Any]] = []
        self.changed = Signal()

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Self]:
        """Within this it has an address."""
        async with serve_app(self.app()) as port:
            self.root_url = f"http://127.0.0.1:{port}"
            self.url = f"{self.root_url}/w/key"
            yield self

    def pause(self, is_paused: bool) -> None:
        """As if its trainer had paused the engines, or let them go on."""
        self.is_paused = is_paused
        self.changed.notify()

    def close_group(self, group_id: str) -> None:
        """As if a deadline had passed."""
        self.closed.append({"seq": len(self.closed) + 1, "group_id": group_id, "state": "discarded"})
        self.changed.notify()

    async def wait_for(self, holds: Callable[[], object], timeout_s: float = 30.0) -> None:
        """Until ``holds()``: looked at whenever something arrives."""
        async with asyncio.timeout(timeout_s):
            while not holds():
                await self.changed.wait(timeout_s)

    @property
    def opened(self) -> list[tuple[Any, int]]:
        """The groups announced, in order."""
        return [tuple(key) for progress in self.progress for key in progress.get("opened", ())]

    def app(self) -> Starlette:
        routes = [
            Route("/w/key/plan", self._plan),
            Route("/w/key/samples", self._samples, methods=["POST"]),
            Route("/w/key/progress", self._progress, methods=["POST"]),
            Route("/w/key/closed_groups", self._closed_groups),
            Route("/buffer/write", self._write, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    async def _plan(self, request: Request) -> Response:
        return self._scripted() or JSONResponse(self.plan)

    async def _samples(self, request: Request) -> Response:
        body = await request.body()
        batch = _decoded(body, request.headers["Content-Type"])
        if request.headers["Content-Type"] == SAMPLES_TYPE:
            framed = map(read_part_frame, filter(is_part_frame, split_samples(body)))
            self.parts |= {digest: bytes(part) for digest, part in framed}
        if (scripted := self._scripted()) is not None:
            return scripted
        self.batch_sizes.append(len(batch))
        self.content_types.append(request.headers["Content-Type"])
        results = [self._take(sample) for sample in batch]
        self.changed.notify()
        return JSONResponse({"results": results})

    def _take(self, sample: Sample) -> dict[str, Any]:
        if (error := self.refused(sample)) is not None:
            return {"error": error}
        is_known = any(known["uid"] == sample["uid"] for known in self.samples)
        if not is_known:
            self.samples.append(sample)
        return {"uid": sample["uid"], "duplicate": is_known, "outcome": "member"}

    async def _progress(self, request: Request) -> Response:
        told = json.loads(await request.body())
        if (scripted := self._scripted()) is not None:
            return scripted
        self.progress.append(told)
        self.changed.notify()
        return JSONResponse({"state": "running"})

    async def _closed_groups(self, request: Request) -> Response:
        after = int(request.query_params["after"])
        knows_paused = request.query_params.get("paused", "").lower() == "true"
        if knows_paused != self.knows_paused:
            self.knows_paused = knows_paused
            self.changed.notify()
        if len(self.closed) <= after and not self.is_stopped and knows_paused == self.is_paused:
            await self.changed.wait(1.0)
        if self.is_gone:
            return JSONResponse({"error": {}}, 410)
        state = "stopped" if self.is_stopped else "running"
        news = {"groups": self.closed[after:], "last": len(self.closed), "run_state": state, "paused": self.is_paused}
        return JSONResponse(news)

    async def _write(self, request: Request) -> Response:
        sample = json.loads(await request.body())
        if (scripted := self._scripted()) is not None:
            return scripted
        self.samples.append(sample)
        self.changed.notify()
        return JSONResponse({"success": True, "message": "", "data": {"data": [sample]}})

    def _scripted(self) -> Response | None:
        if self.is_gone:
            return JSONResponse({"error": {}}, 410)
        return self.answers.pop(0) if self.answers else None


@pytest.fixture
async def buffer() -> AsyncIterator[FakeBuffer]:
    async with FakeBuffer().served() as fake:
        yield fake


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows (objects, or text as it is) to a JSONL file."""

    def write(*rows: object) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write


@pytest.fixture(params=[0, pytest.param(2, marks=pytest.mark.soak)], ids=["alone", "two_workers"])
def with_and_without_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs of a test's own process run their rollouts themselves, and once more (soak) in workers."""
    if request.param:
        run_over_workers(monkeypatch, request.param)
