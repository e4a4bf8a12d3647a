"""What an engine answers beside its chats: whatever it is, whoever asked gets one of our errors, and a run goes on."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from forebay.core.errors import EngineError, ForebayError
from forebay.engines.aborts import abort_prefix
from forebay.engines.capture.fill_gaps import score
from forebay.engines.capture.turn import Turn
from forebay.engines.detect import DetectedEngine
from forebay.engines.dialect import SGLANG
from forebay.engines.openai import OpenAIEngine
from forebay.engines.router_workers import WorkerAdmin, admin_client
from forebay.engines.sglang import SGLangEngine
from forebay.engines.weight_updates import pause, resume, update, wait_idle, workers_of
from tests.attack.hostile_engine import ENDLESS, HEADS, WHOLE_BODIES, HostileEngine, hostile_engine
from tests.kit import ServerProcess

TURN = Turn(messages=[], reply={}, sampled_ids=[5, 6], prompt_ids=[1], finish_reason="stop")
CHAT: dict[str, Any] = {"messages": [], "tools": [{"type": "function", "function": {"name": "f"}}]}
OWN: dict[str, bytes] = {
    "workers": b'{"workers": [{"url": "http://[::1"}, 5]}',
    "worker_urls": b'{"workers": [{"url": "file:///etc/passwd"}]}',
    "worker_port": b'{"workers": [{"url": "http://127.0.0.1:99999999", "is_healthy": true}]}',
    "loads": b'{"loads": [{"num_running_reqs": "many"}]}',
    "loads_object": b'{"loads": {"num_running_reqs": 1}}',
    "info": b'{"model_path": 5, "weight_version": [1], "served_model_name": {}}',
    "defaults": b'{"sampling_defaults": "model", "model_path": "\\u0000", "tool_call_parser": [1]}',
    "data": b'{"data": {"0": {"id": 4}}}',
    "texts": b'{"text": [1, 2], "reasoning_parser": [1], "tool_call_parser": "x", "calls": [5]}',
    "meta": b'{"meta_info": {"input_token_logprobs": [[1]]}}',
    "meta_string": b'{"meta_info": "x"}',
}
"""Answers to what is asked beside chats, each wrong for one question at least."""
MODES = [*WHOLE_BODIES, *HEADS, ENDLESS, *OWN]
LIMIT_S = 30.0


@pytest.fixture(scope="module")
def engine() -> Iterator[HostileEngine]:
    with hostile_engine(bodies=OWN) as engine:
        yield engine


@pytest.mark.parametrize("mode", MODES)
async def test_whoever_asks_gets_an_answer_or_one_of_our_errors(
    engine: HostileEngine, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_MAX_ENGINE_REPLY_BYTES", str(1 << 20))
    engine.admin_mode = mode
    async with (
        admin_client(None, 5.0) as http,
        SGLangEngine(engine.url) as sglang,
        OpenAIEngine(engine.url) as other,
        DetectedEngine(engine.url) as detected,
    ):
        admin = WorkerAdmin(http, engine.url)
        asked: list[Callable[[], Awaitable[object]]] = [
            *(admin.first_model, admin.load, admin.model_info, admin.server_info, admin.workers, admin.abort_all),
            *(admin.flush_cache, admin.resume, admin.pass_scheduler),
            *(lambda: admin.mark("rid"), lambda: admin.pause("abort"), lambda: admin.post_json("/x", {})),
            *(sglang.model_info, sglang.load, sglang.workers, sglang.is_available, other.model_info),
            *(other.is_available, detected.model_info, detected.is_available),
            *(lambda: sglang.abort("prefix", timeout_s=0.2), lambda: abort_prefix(engine.url, "prefix", timeout_s=0.2)),
            lambda: SGLANG.defaults(http, engine.url),
            lambda: SGLANG.whole_message(http, engine.url, TURN, CHAT),
            lambda: score(http, engine.url, [1, 2]),
            lambda: workers_of(http, [engine.url]),
            lambda: pause([admin], "abort", 2.0),
            lambda: wait_idle([admin], "abort", 0.2),
            lambda: update([admin], "/m", 2, "in_place"),
            lambda: resume([admin], 0.2),
        ]
        async with asyncio.timeout(LIMIT_S):
            told = await asyncio.gather(*(each() for each in asked), return_exceptions=True)
    wrong = [each for each in told if isinstance(each, BaseException)]
    assert not [each for each in wrong if not isinstance(each, ForebayError | TimeoutError)], wrong


async def test_a_reply_is_bounded_as_it_arrives_and_as_it_unfolds(
    engine: HostileEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_MAX_ENGINE_REPLY_BYTES", str(1 << 20))
    for mode in (ENDLESS, "bomb"):
        engine.admin_mode = mode
        async with admin_client(None, 5.0) as http:
            with pytest.raises(EngineError, match="larger than 1048576 bytes") as caught:
                await WorkerAdmin(http, engine.url).server_info()
        assert "max_engine_reply_bytes" in caught.value.hint


@pytest.mark.parametrize("mode", ["html", "deep", "worker_urls", "info", "status_999", "bomb"])
def test_weights_for_such_an_engine_are_refused_and_the_server_goes_on(
    server: ServerProcess, engine: HostileEngine, mode: str
) -> None:
    engine.admin_mode = mode
    run = server.start_run(remote_engine_url=engine.url)
    told = {"weight_version": 3, "mode": "abort", "model_path": "/m"}
    reply = run.client.put(f"{run.path}/weight_version", json=told)
    assert reply.status_code in (409, 422, 502, 503), reply.text
    assert set(reply.json()["error"]) >= {"code", "message", "hint"}
    assert run.view()["state"] == "running"
    run.stop()
    assert "Traceback" not in server.log()
