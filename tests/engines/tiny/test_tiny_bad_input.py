"""What nobody should send to the embedded engine: refused as 400, and nothing is left of it."""

import asyncio
import contextlib
import json
from typing import Any

import httpx
import pytest

HALF = "\ud800"
JSON = {"content-type": "application/json"}
CHAT = "/v1/chat/completions"
PARAMS: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}
LIMIT_S = 60.0


def chat(content: str = "a", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "ignore_eos": True, **fields}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": HALF}),
        ("/generate", {"text": "a", "rid": HALF}),
        ("/generate", {"text": "a", "sampling_params": {HALF: 1}}),
        (CHAT, chat(HALF)),
        (CHAT, chat(rid=HALF)),
        (CHAT, chat(model=HALF)),
        (CHAT, chat(tools=[{"function": {HALF: 1}}])),
        ("/tokenize", {"prompt": HALF}),
        ("/update_weight_version", {"new_version": HALF}),
        ("/update_weights_from_disk", {"model_path": HALF}),
    ],
)
async def test_text_that_utf8_cannot_hold_is_refused(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    reply = await http.post(path, content=json.dumps(body), headers=JSON)
    assert reply.status_code == 400, reply.text
    assert "surrogate" in reply.text
    assert (await http.get("/model_info")).status_code == 200


async def test_whole_surrogate_pairs_are_text(http: httpx.AsyncClient) -> None:
    reply = await http.post("/tokenize", content=rb'{"prompt": "\ud83d\ude00"}', headers=JSON)
    tokens = reply.json()["tokens"]
    assert (await http.post("/detokenize", json={"tokens": tokens})).json() == {"text": "\U0001f600"}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_empty_list_of_prompts_is_refused(http: httpx.AsyncClient, stream: bool) -> None:
    reply = await http.post("/generate", json={"text": [], "stream": stream})
    assert reply.status_code == 400
    assert "at least one prompt" in reply.text


@pytest.mark.parametrize("path", ["/update_weights_from_disk", CHAT])
async def test_what_is_much_too_long_or_too_deep_is_refused(http: httpx.AsyncClient, path: str) -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    reply = await http.post(path, json={"model_path": "a" * 5_000, **chat(tools=[{"deep": deep}])})
    assert reply.status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    # Long enough for the last to come while the first is under way, on a busy machine too.
    [
        ("/generate", {"text": "a", "sampling_params": PARAMS | {"max_new_tokens": 1_000}, "rid": "same"}),
        (CHAT, chat(rid="same", max_tokens=1_000)),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_of_calls_with_one_id_at_one_time_one_is_answered(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], stream: bool
) -> None:
    replies = await asyncio.gather(*(http.post(path, json={**body, "stream": stream}) for _ in range(4)))
    assert sorted(reply.status_code for reply in replies) == [200, 400, 400, 400]
    assert all("Duplicate request ID" in reply.text for reply in replies if reply.status_code == 400)
    again = await http.post(path, json={**body, "stream": stream})
    assert again.status_code == 200, "the id was not freed"


async def test_a_list_with_one_id_twice_is_refused_and_takes_none(http: httpx.AsyncClient) -> None:
    body = {"text": ["a", "b", "c"], "sampling_params": PARAMS}
    assert (await http.post("/generate", json={**body, "rid": ["x", "y", "x"]})).status_code == 400
    assert (await http.post("/generate", json={**body, "rid": ["x", "y", "z"]})).status_code == 200


async def test_a_reader_that_goes_away_at_once_leaves_its_id(http: httpx.AsyncClient) -> None:
    body = {
        "text": "a",
        "rid": "left",
        "stream": True,
        "sampling_params": {"max_new_tokens": 4_000, "ignore_eos": True},
    }
    for delay_s in (0.001, 0.003, 0.01, 0.03):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await http.post("/generate", json=body)
    short = {**body, "stream": False, "sampling_params": PARAMS}
    async with asyncio.timeout(LIMIT_S):
        while (await http.post("/generate", json=short)).status_code != 200:  # noqa: ASYNC110 -- no event tells of it
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("content", [b'"text"', b"[1]", b"null", b'"\\ud800"', b"{"])
@pytest.mark.parametrize("headers", [JSON, {"content-type": "text/plain"}])
async def test_a_body_that_is_no_object_is_refused(
    http: httpx.AsyncClient, content: bytes, headers: dict[str, str]
) -> None:
    assert (await http.post("/generate", content=content, headers=headers)).status_code == 400
