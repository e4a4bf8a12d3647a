"""Bodies that engines read otherwise than they look: nothing gets past the record or the bounds that way."""

import json
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Stage, codes_of
from tests.gateway.gateway_kit import USER, Json, OpenedAt, assert_whole

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: Json = {"model": "any", "messages": [USER]}


async def send(rollout: OpenedAt, content: bytes, path: str = "v1/chat/completions", **headers: str) -> httpx.Response:
    url = rollout.base_url.removesuffix("v1") + path
    auth = {"Authorization": f"Bearer {rollout.key}"}
    return await rollout.gateway.http.post(url, content=content, headers=auth | headers)


@pytest.mark.parametrize(
    "content",
    [
        json.dumps(ASK).encode("utf-16"),
        json.dumps(ASK).encode("utf-8-sig"),
        json.dumps({**ASK, "messages": [{**USER, "content": "half a \ud83d"}]}).encode(),
    ],
)
async def test_what_engines_take_for_json_is_recorded(stage: Stage, content: bytes) -> None:
    stage("4")
    rollout = await stage.open(max_tokens=7)
    assert (await send(rollout, content)).status_code == 200
    assert_whole((await rollout.close())["samples"][0])
    assert stage.calls[0].body["max_tokens"] == 7


@pytest.mark.parametrize("path", ["v1/chat/completions", "v1/responses", "anthropic/v1/messages"])
async def test_what_cannot_be_passed_on_is_refused(stage: Stage, path: str) -> None:
    stage("4")
    rollout = await stage.open()
    asked = json.dumps(ASK | {"input": "2+2?", "max_tokens": 7, "temperature": 1})
    deep = asked.replace("1}", "[" * 100_000 + "]" * 100_000 + "}")
    for content in (asked.replace("1}", "NaN}"), asked.replace("1}", "1e999}"), deep):
        reply = await send(rollout, content.encode(), path)
        assert reply.status_code == 400
        assert "not a JSON object" in reply.text
    assert stage.calls == []


async def test_what_is_no_json_at_all_the_engine_answers(stage: Stage) -> None:
    rollout = await stage.open()
    for content in (b"", b"no json", b"[]", b'{"a":"\xff"}'):
        reply = await send(rollout, content)
        direct = await stage.gateway.http.post(f"{stage.engine.url}/v1/chat/completions", content=content)
        assert reply.status_code >= 400
        assert (reply.status_code, reply.content) == (direct.status_code, direct.content)


@pytest.mark.parametrize("word", [1, 1.0, "true", "True", "on", "1", "yes"])
async def test_a_stream_may_be_asked_for_in_other_words(stage: Stage, word: Any) -> None:
    stage("four")
    rollout = await stage.open()
    reply = await rollout.post("chat/completions", {**ASK, "stream": word})
    assert reply.text.endswith("data: [DONE]\n\n")
    assert_whole((await rollout.close())["samples"][0])


async def test_a_bound_holds_however_a_number_is_told(stage: Stage) -> None:
    stage("4")
    rollout = await stage.open(max_tokens=32)
    for told in (99, 99.0, "99", " 99 ", 10**400, "1e9"):
        await rollout.post("chat/completions", {**ASK, "max_tokens": told})
        await rollout.post("chat/completions", {**ASK, "max_completion_tokens": told, "max_tokens": told})
    assert {call.body["max_tokens"] for call in stage.calls} == {32}
    assert {call.body.get("max_completion_tokens") for call in stage.calls} == {None, 32}
    await rollout.chat(max_tokens="5")
    assert stage.calls[-1].body["max_tokens"] == "5"


async def test_a_prompt_in_token_ids_is_refused(stage: Stage) -> None:
    stage("4")
    rollout = await stage.open()
    reply = await rollout.post("chat/completions", {**ASK, "input_ids": [10**6]})
    assert codes_of([reply]) == [(400, "input_ids_refused")]
    assert reply.json()["error"]["param"] == "input_ids"
    assert stage.calls == []


@pytest.mark.parametrize("rollout_id", [".", "..", ".hidden"])
async def test_a_rollouts_name_is_no_path(stage: Stage, rollout_id: str) -> None:
    body = {"rollout_id": rollout_id, "deadline_s": 1}
    assert (await stage.gateway.ask("POST", "rollouts", body)).status_code == 422


@pytest.mark.parametrize("path", ["v1//chat/completions", "v1/chat/completions/", "v1/%2e%2e/%2e%2e/rollouts", "%2f"])
async def test_other_spellings_of_a_path_are_no_routes(stage: Stage, path: str) -> None:
    stage("4")
    rollout = await stage.open()
    reply = await send(rollout, json.dumps(ASK).encode(), path)
    assert codes_of([reply]) in ([(404, "no_such_route")], [(401, "invalid_api_key")])
    assert stage.calls == []


async def test_a_body_needs_no_content_type(stage: Stage) -> None:
    stage("4")
    rollout = await stage.open()
    for kind in ("", "text/plain", "application/x-www-form-urlencoded"):
        assert (await send(rollout, json.dumps(ASK).encode(), **{"content-type": kind})).status_code == 200
