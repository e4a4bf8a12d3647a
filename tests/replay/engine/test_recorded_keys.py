"""Keys of an engine that wants one: none is in the file, in whatever they come, and what they open is recorded."""

from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from forebay.engines.detect import DetectedEngine
from forebay.replay import EngineRecorder, RecordedEngine, Recording
from forebay.web.serving import serve_app
from tests.replay.engine.calls_kit import LIMIT_S, SAYS

KEY = "sk-s3cret"
BEARER = {"authorization": f"Bearer {KEY}"}


async def _info(request: Request) -> Response:
    return _guarded(request, {"served_model_name": "m", "api_key": KEY, "nested": [{"hf_token": KEY}], "tp_size": 2})


async def _chat(request: Request) -> Response:
    request.app.state.queries.append(request.url.query)
    return _guarded(request, {"answer": len(request.app.state.queries)})


def _guarded(request: Request, told: dict[str, Any]) -> Response:
    """SGLang with ``--api-key``: 401 without it; its ``/server_info`` tells all that it was started with."""
    is_known = request.headers.get("authorization") == BEARER["authorization"] or KEY in request.url.query
    return JSONResponse(told) if is_known else JSONResponse({"error": "Unauthorized"}, status_code=401)


ENGINE = Starlette(
    routes=[
        *(Route(path, _info) for path in ("/model_info", "/server_info", "/v1/models")),
        Route("/v1/chat/completions", _chat, methods=["POST"]),
    ]
)
ENGINE.state.queries = []


def stored(file: Path) -> bytes:
    """Everything that is in the file, unfolded."""
    with Recording.open(file) as recording:
        return repr(list(recording.calls())).encode()


async def test_no_key_is_in_the_file_and_a_replay_wants_none(tmp_path: Path) -> None:
    file, chats = tmp_path / "calls.fbr", "/v1/chat/completions"
    async with (
        serve_app(ENGINE) as port,
        EngineRecorder(file, f"http://127.0.0.1:{port}") as recorder,
        httpx.AsyncClient(timeout=LIMIT_S) as http,
    ):
        refused = await http.get(f"{recorder.url}/model_info")
        assert refused.status_code == 401
        assert (await http.post(f"{recorder.url}{chats}", json=SAYS)).status_code == 401
        by_header = (await http.post(f"{recorder.url}{chats}", json=SAYS, headers=BEARER)).json()
        by_query = (await http.post(f"{recorder.url}{chats}?api_key={KEY}&a=b", json=SAYS)).json()
        assert ENGINE.state.queries[-1] == f"api_key={KEY}&a=b"  # the engine gets it
    assert KEY.encode() not in stored(file)
    async with RecordedEngine(file) as replayed, httpx.AsyncClient(timeout=LIMIT_S) as http:
        # Asked by the recorder itself, once a call had brought the key.
        for path in ("/model_info", "/server_info"):
            told = await http.get(f"{replayed.url}{path}")
            assert (told.status_code, told.json()) == (200, {"served_model_name": "m", "nested": [{}], "tp_size": 2})
        async with DetectedEngine(replayed.url) as detected:
            assert (await detected.model_info()).model == "m"
        assert (await http.post(f"{replayed.url}{chats}", json=SAYS)).json() == by_header
        assert (await http.post(f"{replayed.url}{chats}?api_key=another&a=b", json=SAYS)).json() == by_query
        assert (await http.post(f"{replayed.url}{chats}?api_key=another&a=c", json=SAYS)).status_code == 422
        assert KEY not in replayed.misses.pop()


async def test_a_compressed_request_reaches_the_engine_as_it_was_sent(tmp_path: Path) -> None:
    seen: list[tuple[str | None, bytes]] = []

    async def answer(request: Request) -> Response:
        seen.append((request.headers.get("content-encoding"), await request.body()))
        return JSONResponse({})

    app = Starlette(routes=[Route("/v1/completions", answer, methods=["POST"])])
    async with (
        serve_app(app) as port,
        EngineRecorder(tmp_path / "calls.fbr", f"http://127.0.0.1:{port}") as recorder,
        httpx.AsyncClient(timeout=LIMIT_S) as http,
    ):
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        await http.post(f"{recorder.url}/v1/completions", content=b"\x1f\x8b folded", headers=headers)
    assert seen == [("gzip", b"\x1f\x8b folded")]
