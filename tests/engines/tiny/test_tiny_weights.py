"""New weights for a running engine, and what its replies tell about weights and tokens."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from forebay.engines.tiny.model import build_network, build_tokenizer
from forebay.engines.tiny.recipe import Recipe, question

LIMIT_S = 60.0
TALK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": question(3, 5)}]}
ENDLESS: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True}


@pytest.fixture
async def http(own_engine_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an engine that has the weights that it was started with."""
    async with httpx.AsyncClient(base_url=own_engine_url, timeout=LIMIT_S) as http:
        yield http


async def update(http: httpx.AsyncClient, folder: Path, **fields: Any) -> httpx.Response:
    return await http.post("/update_weights_from_disk", json={"model_path": str(folder), **fields})


async def chat(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    reply = await http.post("/v1/chat/completions", json=TALK | {"max_tokens": 12, "temperature": 0} | fields)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


async def wait_num_running(http: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while (await http.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] != count:  # noqa: ASYNC110 -- another process
            await asyncio.sleep(0.02)


def text_of(reply: dict[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


async def test_new_weights_answer_and_are_named(
    http: httpx.AsyncClient, model_folder: Path, other_folder: Path
) -> None:
    before = await chat(http)
    assert before["metadata"]["weight_version"] == "default"
    reply = await update(http, other_folder, weight_version="7")
    assert (reply.status_code, reply.json()["success"]) == (200, True)
    after = await chat(http)
    assert text_of(after) != text_of(before)
    num_tokens = after["usage"]["completion_tokens"]
    spans = [{"version": "7", "start": 0, "end": num_tokens}]
    assert after["metadata"] == {"weight_version": "7", "weight_versions": spans}
    info = (await http.get("/model_info")).json()
    assert (info["weight_version"], info["model_path"]) == ("7", str(other_folder))
    assert (await update(http, model_folder)).status_code == 200
    again = await chat(http)
    assert text_of(again) == text_of(before)
    assert again["metadata"]["weight_version"] == "7", "without a version, the last one stands"


async def test_a_call_in_flight_goes_on_with_the_new_weights(http: httpx.AsyncClient, other_folder: Path) -> None:
    call = asyncio.create_task(chat(http, rid="long", temperature=1, **ENDLESS))
    await wait_num_running(http, 1)
    assert (await update(http, other_folder, weight_version="1")).json()["success"]
    later = await chat(http)  # generated beside the long one, so that it has tokens of the new weights as well
    await http.post("/abort_request", json={"rid": "long"})
    reply = await call
    first, second = reply["metadata"]["weight_versions"]
    assert (first["version"], first["start"], second["version"]) == ("default", 0, "1")
    assert 0 < first["end"] == second["start"]
    assert second["end"] == reply["usage"]["completion_tokens"]
    assert second["end"] - second["start"] >= later["usage"]["completion_tokens"] - 1
    assert reply["choices"][0]["finish_reason"] == "abort"


async def test_calls_in_flight_can_be_ended_instead(http: httpx.AsyncClient, other_folder: Path) -> None:
    call = asyncio.create_task(chat(http, **ENDLESS))
    await wait_num_running(http, 1)
    await update(http, other_folder, weight_version="1", abort_all_requests=True)
    reply = await call
    assert reply["choices"][0]["finish_reason"] == "abort"
    assert [span["version"] for span in reply["metadata"]["weight_versions"]] == ["default"]


async def test_a_folder_that_does_not_fit_changes_nothing(
    http: httpx.AsyncClient, model_folder: Path, tmp_path: Path
) -> None:
    small = Recipe(hidden_size=32, num_layers=1, intermediate_size=64)
    build_network(small, build_tokenizer(small)).save_pretrained(tmp_path / "small")
    shutil.copytree(model_folder, tmp_path / "cut")
    with (tmp_path / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    shutil.copytree(model_folder, tmp_path / "partial")
    state = load_file(model_folder / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, tmp_path / "partial" / "model.safetensors", metadata={"format": "pt"})
    before = await chat(http)
    problems = {
        "absent": "no config.json",
        "small": "another shape",
        "cut": "cannot be read",
        "partial": "model.norm.weight are missing",
    }
    for name, told in problems.items():
        reply = await update(http, tmp_path / name, weight_version="9")
        assert reply.status_code == 400
        body = reply.json()
        assert (body["success"], body["num_paused_requests"]) == (False, 0)
        assert told in body["message"]
    assert (await http.post("/update_weights_from_disk", json={})).status_code == 400
    assert text_of(await chat(http)) == text_of(before)
    assert (await http.get("/model_info")).json()["weight_version"] == "default"


async def test_a_prompt_asked_again_is_not_read_again(http: httpx.AsyncClient) -> None:
    async def num_read() -> int:
        return int((await http.get("/v1/loads")).json()["loads"][0]["total_prefill_uncached_tokens"])

    before = await num_read()
    messages = [{"role": "user", "content": "something new"}]
    first = await chat(http, messages=messages)
    assert text_of(await chat(http, messages=messages)) == text_of(first)
    await chat(http, messages=messages, n=2)
    assert await num_read() - before == first["usage"]["prompt_tokens"]
    assert (await http.get("/v1/loads")).json()["loads"][0]["cache_hit_rate"] > 0
