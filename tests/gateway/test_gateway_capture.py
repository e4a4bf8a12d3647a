"""A generator that knows nothing of the gateway: its calls are recorded, its samples get the tokens of their turns."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.engines.scripted.tokens import encode
from tests.engines.fake_vllm import FakeVLLM
from tests.gateway.conftest import Stage
from tests.gateway.gateway_kit import LIMIT_S, USER, GatewayAt, Json, assert_whole, eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINES = {"sglang": ScriptedEngine, "vllm": FakeVLLM}

RUN = "run-captured00000"
SYSTEM = {"role": "system", "content": "You add."}


class Generator:
    """What a foreign generator does with the URL that it was given."""

    def __init__(self, gateway: GatewayAt) -> None:
        self.gateway = gateway
        self.url = f"{gateway.url}/gateway/secret"

    async def ask(self, *messages: Json, **fields: object) -> httpx.Response:
        body = {"model": "m", "messages": list(messages), **fields}
        return await self.gateway.http.post(f"{self.url}/v1/chat/completions", json=body)

    async def answer(self, *messages: Json, **fields: object) -> Json:
        reply = await self.ask(*messages, **fields)
        message: Json = reply.json()["choices"][0]["message"]
        return {"role": "assistant", "content": message["content"]}

    async def write(self, messages: list[Json], **fields: object) -> Json:
        """Write a sample; as it reached the buffer."""
        sample = {"uid": "u", "instance_id": "a", "reward": 1.0, "messages": messages, **fields}
        reply = await self.gateway.http.post(f"{self.url}/buffer/write", json=sample)
        assert reply.json() == {"success": True}
        return self.gateway.buffer.written[-1]


@pytest_asyncio.fixture(loop_scope="module")
async def generator(stage: Stage, tmp_path: Path) -> AsyncIterator[Generator]:
    """A run with two rows, whose groups take a minute at most."""
    rows = [{"instance_id": name, "prompt": [{"role": "user", "content": f"row {name}"}]} for name in ("a", "b")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "no row\n")
    capturing = {"secret": "secret", "group_deadline_s": 60, "input_file": str(path)}
    await stage.gateway.register(stage.engine.url, run_id=RUN, key="captured", capturing=capturing)
    yield Generator(stage.gateway)
    await stage.gateway.forget(RUN)


async def test_a_sample_gets_the_tokens_of_its_only_turn(stage: Stage, generator: Generator) -> None:
    stage("four")
    sample = await generator.write([USER, await generator.answer(USER)], extra_info={"kept": True})
    assert_whole(sample)
    assert sample["tokens"][-5:-1] == encode("four")
    assert sample["messages"][-1]["content"] == "four"
    assert sample["extra_info"] == {"kept": True}


async def test_a_sample_gets_all_turns_of_its_conversation(stage: Stage, generator: Generator) -> None:
    stage(lambda call: f"reply to {call.prompt}")
    messages = [USER]
    messages.append(await generator.answer(*messages))
    messages.append({"role": "user", "content": "and 3+3?"})
    messages.append(await generator.answer(*messages))
    sample = await generator.write(messages)
    assert_whole(sample)
    replies = ["reply to 2+2?", "reply to and 3+3?"]
    assert sum(sample["loss_mask"]) == sum(len(encode(reply)) + 1 for reply in replies)


async def test_equal_replies_are_each_taken_once(stage: Stage, generator: Generator) -> None:
    stage("4")
    answers = [await generator.answer(USER) for _ in range(2)]
    samples = [await generator.write([USER, answer]) for answer in [*answers, answers[0]]]
    assert ["tokens" in sample for sample in samples] == [True, True, False]


async def test_choices_of_one_call_are_told_apart(stage: Stage, generator: Generator) -> None:
    stage(lambda call: f"choice {call.choice}")
    reply = await generator.ask(USER, n=2)
    for choice in reply.json()["choices"]:
        content = choice["message"]["content"]
        sample = await generator.write([USER, {"role": "assistant", "content": content}])
        assert sample["tokens"][-len(content) - 1 : -1] == encode(content)


async def test_a_streamed_reply_is_found_as_well(stage: Stage, generator: Generator) -> None:
    stage("by and by")
    assert (await generator.ask(USER, stream=True)).text.endswith("data: [DONE]\n\n")
    assert_whole(await generator.write([USER, {"role": "assistant", "content": "by and by"}]))


async def test_blanks_around_a_text_do_not_matter(stage: Stage, generator: Generator) -> None:
    stage(" four\n")
    answer = await generator.answer(USER)
    parts = [{"type": "text", "text": "2+2?"}]
    messages = [{"role": "user", "content": parts}, {**answer, "content": answer["content"].strip()}]
    assert "tokens" in await generator.write(messages)


async def test_what_was_not_recorded_goes_on_as_it_is_and_is_counted(stage: Stage, generator: Generator) -> None:
    stage("4")
    await generator.write([USER, await generator.answer(USER)])
    await generator.answer(USER)
    changed = [USER, {"role": "assistant", "content": "another"}]
    assert "tokens" not in await generator.write(changed)
    own = await generator.write([USER, {"role": "assistant", "content": "4"}], tokens=[1, 2])
    assert (own["tokens"], "loss_mask" in own) == ([1, 2], False)
    counts = {"capture_matched": 1, "capture_unmatched": 1}
    await eventually(lambda: any(report.get("counts") == counts for report in stage.gateway.buffer.reports))


async def test_the_buffers_answer_is_passed_on(generator: Generator) -> None:
    for content in (b"no json", b"[]", b'{"messages": 1}'):
        reply = await generator.gateway.http.post(f"{generator.url}/buffer/write", content=content)
        assert (reply.status_code, reply.json()["message"]) == (422, "no sample")


async def test_calls_of_a_group_that_timed_out_are_aborted_and_get_what_there_was(
    stage: Stage, generator: Generator
) -> None:
    stage(lambda call: Reply(text=f"begun for {call.prompt}", hang=True))
    rows = {name: {"role": "user", "content": f"row {name}"} for name in ("a", "b")}
    ended = [
        asyncio.create_task(generator.ask(rows["a"])),
        asyncio.create_task(generator.ask(SYSTEM, rows["a"])),
        asyncio.create_task(generator.ask(rows["a"], {"role": "assistant", "content": "1"}, USER, stream=True)),
    ]
    left = asyncio.create_task(generator.ask(rows["b"]))
    await stage.busy(4)
    await eventually(lambda: all(call.sampled_ids for call in stage.calls))
    stage.gateway.buffer.close_group("a", reason="invalid")
    stage.gateway.buffer.close_group("a")
    whole, with_system, streamed = await asyncio.gather(*ended)
    for reply in (whole, with_system):
        (choice,) = reply.json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("begun for row a", "abort")
    assert '"finish_reason":"abort"' in streamed.text
    await stage.busy(1)
    assert not left.done()
    await stage.gateway.forget(RUN)
    assert (await left).status_code == 410
    await stage.busy(0)


async def test_a_call_takes_no_longer_than_a_group_may(stage: Stage) -> None:
    stage(Reply(hang=True))
    capturing = {"secret": "hurried", "group_deadline_s": 0.2}
    await stage.gateway.register(stage.engine.url, run_id="run-hurried000000", key="h", capturing=capturing)
    url = f"{stage.gateway.url}/gateway/hurried/v1/chat/completions"
    assert (await stage.gateway.http.post(url, json={"messages": [USER]})).status_code == 410
    await stage.busy(0)
    await stage.gateway.forget("run-hurried000000")


async def test_the_address_dies_with_its_run(stage: Stage, generator: Generator) -> None:
    stage("4")
    assert (await generator.ask(USER)).status_code == 200
    await stage.gateway.forget(RUN)
    assert (await generator.ask(USER)).status_code == 401
    assert (await generator.gateway.http.post(f"{generator.url}/buffer/write", json={})).status_code == 401


async def test_what_the_trainer_announced_keeps_caches_apart(stage: Stage, generator: Generator) -> None:
    stage("4")
    await generator.ask(USER)
    await generator.ask(USER)
    first, again = (stage.key_of(call) for call in stage.calls)
    assert first == again
    stage.gateway.buffer.weight_version = 7
    stage.gateway.buffer.close_group("none of them")
    async with asyncio.timeout(LIMIT_S):
        while stage.key_of(stage.calls[-1]) == first:
            await generator.ask(USER)
    assert first not in stage.key_of(stage.calls[-1])
    stage.gateway.buffer.weight_version = None


async def test_what_a_writer_says_of_itself_is_passed_on(generator: Generator) -> None:
    await generator.write([USER])
    sample = {"uid": "u", "instance_id": "a", "reward": 1.0, "messages": [USER]}
    headers = {"X-Forebay-Writer": "base-generator"}
    await generator.gateway.http.post(f"{generator.url}/buffer/write", json=sample, headers=headers)
    assert generator.gateway.buffer.writers[-2:] == ["", "base-generator"]
