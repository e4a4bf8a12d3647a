"""A gateway in the test's own process, before scripted engines, and what opens rollouts at it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import openai
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.core.ids import run_rid_prefix
from forebay.core.waiting import Signal
from forebay.core.weight_versions import AnnouncedWeights
from forebay.gateway.app import create_gateway
from forebay.gateway.spec import GatewaySpec
from forebay.web.serving import serve_app

Json = dict[str, Any]

RUN_ID = "run-0123456789ab"
CONTROL_KEY = "control-key"
RUN_KEY = "run-key"
USER = {"role": "user", "content": "2+2?"}
LIMIT_S = 30.0


class FakeBuffer:
    """The server's side of a run's private address, as far as the gateway uses it."""

    def __init__(self) -> None:
        self.written: list[Json] = []
        self.writers: list[str] = []
        """What the writer of each sample said of itself."""
        self.reports: list[Json] = []
        self.weight_version: int | None = None
        self.is_still = False
        self._known_still: bool | None = None
        self.is_paused = False
        self._known_paused = False
        self.step = 0
        self.num_asked = 0
        """How often the feed was asked."""
        self._closed: list[Json] = []
        self._news = Signal()
        self.app = Starlette(
            routes=[
                Route("/w/key/buffer/write", self._write, methods=["POST"]),
                Route("/w/key/progress", self._progress, methods=["POST"]),
                Route("/w/key/closed_groups", self._feed),
            ]
        )

    @property
    def _weights(self) -> AnnouncedWeights:
        version = self.weight_version
        told = AnnouncedWeights(f"announced-{version}", version or 0, version, last_kept=version or 0)
        return AnnouncedWeights() if version is None else told

    def close_group(self, instance_id: str | int, reason: str = "timed_out") -> None:
        """As at the deadline of a group."""
        self._closed.append({"instance_id": instance_id, "reason": reason, "is_salvaged": False})
        self._news.notify()

    async def stand(self, is_still: bool) -> None:
        """The run's deadlines stand still, or count again. Returns once the gateway has heard of it."""
        self.is_still = is_still
        self._news.notify()
        await eventually(lambda: self._known_still is is_still)

    async def pause(self, is_paused: bool) -> None:
        """The engines are paused, or go on. Returns once the gateway has heard of it."""
        self.is_paused = is_paused
        self._news.notify()
        await eventually(lambda: self._known_paused is is_paused)

    def end(self) -> None:
        """Answer those who wait."""
        self._news.close()

    async def _write(self, request: Request) -> Response:
        try:
            sample = await request.json()
        except ValueError:
            sample = None
        if not isinstance(sample, dict) or "instance_id" not in sample:
            return JSONResponse({"success": False, "message": "no sample"}, 422)
        self.written.append(sample)
        self.writers.append(request.headers.get("X-Forebay-Writer", ""))
        return JSONResponse({"success": True})

    async def _progress(self, request: Request) -> Response:
        self.reports.append(await request.json())
        return JSONResponse({"state": "running"})

    async def _feed(self, request: Request) -> Response:
        self.num_asked += 1
        after, wait_s = int(request.query_params["after"]), float(request.query_params["wait_s"])
        self._known_still = {"true": True, "false": False}.get(request.query_params.get("still", ""))
        self._known_paused = request.query_params.get("paused") == "true"
        is_known = self._known_still in (None, self.is_still) and self._known_paused is self.is_paused
        if len(self._closed) <= after and is_known:
            await self._news.wait(wait_s)
        told = {"groups": self._closed[after:], "last": len(self._closed), "seen": 0}
        step = {"number": self.step, "weight_version": self.weight_version, "weights": asdict(self._weights)}
        return JSONResponse({**told, "step": step, "paused": self.is_paused, "still": self.is_still})


@dataclass
class OpenedAt:
    """An open rollout, as its agent has it."""

    gateway: "GatewayAt"
    rollout_id: str
    base_url: str
    anthropic_url: str
    key: str

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        """The official client of an agent."""
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.key, max_retries=0, **options)

    async def post(self, path: str, body: Any, *, key: str | None = None, **headers: str) -> httpx.Response:
        """A plain request of the agent, below its base URL."""
        headers["Authorization"] = f"Bearer {self.key if key is None else key}"
        return await self.gateway.http.post(f"{self.base_url}/{path}", json=body, headers=headers)

    async def chat(self, *messages: Json, **fields: Any) -> Json:
        """A whole chat completion."""
        reply = await self.post("chat/completions", {"model": "any", "messages": list(messages or [USER]), **fields})
        assert reply.status_code == 200, reply.text
        answer: Json = reply.json()
        return answer

    async def record(self) -> Json:
        return await self.gateway.control("GET", f"rollouts/{self.rollout_id}")

    async def close(self) -> Json:
        return await self.gateway.control("POST", f"rollouts/{self.rollout_id}/close")


@dataclass
class GatewayAt:
    """A gateway at an address, with one run registered."""

    url: str
    http: httpx.AsyncClient
    buffer_url: str
    buffer: FakeBuffer

    async def control(self, method: str, path: str, body: Json | None = None, *, key: str = RUN_KEY) -> Json:
        """A call of the server's or the run's."""
        reply = await self.ask(method, path, body, key=key)
        assert reply.is_success, reply.text
        answer: Json = reply.json()
        return answer

    async def ask(self, method: str, path: str, body: Any = None, *, key: str = RUN_KEY) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}"}
        return await self.http.request(method, f"{self.url}/gateway/{path}", json=body, headers=headers)

    async def register(self, *engine_urls: str, run_id: str = RUN_ID, **changes: Any) -> None:
        told = {"key": RUN_KEY, "engine_urls": list(engine_urls), "buffer_url": self.buffer_url, **changes}
        await self.control("PUT", f"runs/{run_id}", told, key=CONTROL_KEY)

    async def forget(self, run_id: str = RUN_ID) -> None:
        await self.control("DELETE", f"runs/{run_id}", key=CONTROL_KEY)

    async def open(self, rollout_id: str = "r-1", *, key: str = RUN_KEY, **fields: Any) -> OpenedAt:
        told = await self.control("POST", "rollouts", {"rollout_id": rollout_id, "deadline_s": 60, **fields}, key=key)
        return OpenedAt(self, **told)


@asynccontextmanager
async def gateway_before(*engine_urls: str, **changes: Any) -> AsyncIterator[GatewayAt]:
    """A gateway with a run on these engines."""
    spec = GatewaySpec(CONTROL_KEY, "", max_body_bytes=1 << 20, max_bodies_bytes=1 << 24)
    buffer = FakeBuffer()
    async with (
        httpx.AsyncClient(timeout=LIMIT_S) as http,
        serve_app(buffer.app) as buffer_port,
        _served(spec) as url,
    ):
        gateway = GatewayAt(url, http, f"http://127.0.0.1:{buffer_port}/w/key", buffer)
        await gateway.register(*engine_urls, **changes)
        yield gateway
        buffer.end()


@asynccontextmanager
async def _served(spec: GatewaySpec) -> AsyncIterator[str]:
    app = create_gateway(spec)
    async with serve_app(app) as port, app.router.lifespan_context(app):
        url = f"http://127.0.0.1:{port}"
        object.__setattr__(spec, "url", url)
        yield url


async def eventually(condition: Callable[[], bool]) -> None:
    """Return once ``condition`` holds: for what another task does and cannot announce."""
    until_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < until_s, "not in time"
        await asyncio.sleep(0.005)


def rid_of_run(rid: str | None) -> bool:
    """Whether an engine's request is one of the run's."""
    return (rid or "").startswith(run_rid_prefix(RUN_ID))


def assert_whole(sample: Json) -> None:
    """Every token has its mask and its logprob, the spans cover them all, and what was sampled is trained on."""
    tokens, mask, spans = sample["tokens"], sample["loss_mask"], sample["token_spans"]
    assert len(tokens) == len(mask) == len(sample["logprobs"])
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == len(tokens)
    sampled = [span for span in spans if span["source"] == "llm"]
    assert sum(sum(mask[span["start"] : span["end"]]) for span in sampled) == sum(mask) > 0
