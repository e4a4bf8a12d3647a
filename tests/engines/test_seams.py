"""Messages read from all tokens of a turn that was cut."""

from typing import Any

import pytest

from forebay.engines.capture.turn import Turn, VersionSpan, continues, cut, merge
from forebay.engines.continuation.message import EngineReading, Whole
from forebay.engines.router_workers import WorkerAdmin, admin_client
from forebay.engines.scripted import ScriptedEngine
from forebay.engines.scripted.tokens import TURN_END, encode
from forebay.web.serving import serve_app


def turn(sampled: str, prompt: str = "p", *versions: str, **changes: Any) -> Turn:
    """A turn of bytes, half of them from each version."""
    ids = encode(sampled)
    ends = [len(ids) * (number + 1) // len(versions) for number in range(len(versions))]
    spans = [VersionSpan(name, start, end) for name, start, end in zip(versions, [0, *ends], ends, strict=False)]
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "reply": {"role": "assistant", "content": sampled},
        "prompt_ids": encode(prompt),
        "sampled_ids": ids,
        "logprobs": [-float(token) for token in ids],
        "versions": spans,
        "finish_reason": "abort",
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(ids)},
    }
    return Turn(**(fields | changes))


def test_two_parts_are_one_turn_with_the_versions_of_both() -> None:
    first, rest = turn("ab", "p", "1", "2", began_s=1.0), turn("cd", "pab", "2", "3", finish_reason="stop", ended_s=5.0)
    assert continues(first, rest)
    whole = merge(first, rest)
    assert (whole.prompt_ids, whole.sampled_ids) == (encode("p"), encode("abcd"))
    assert whole.logprobs == [-float(token) for token in encode("abcd")]
    assert whole.versions == [VersionSpan("1", 0, 1), VersionSpan("2", 1, 3), VersionSpan("3", 3, 4)]
    assert (whole.finish_reason, whole.reply["content"], whole.began_s, whole.ended_s) == ("stop", "abcd", 1.0, 5.0)
    assert whole.usage == {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}


def test_only_what_was_aborted_is_gone_on_with_and_only_from_its_end() -> None:
    first = turn("ab")
    assert not continues(turn("ab", finish_reason="stop"), turn("cd", "pab"))
    assert not continues(first, turn("cd", "pa"))
    assert not continues(first, turn("cd", "pab", prompt_ids=None))
    assert not continues(turn("ab", sampled_ids=None), turn("cd", "p"))


@pytest.mark.parametrize("untold", ["first", "rest"])
def test_what_one_part_does_not_tell_is_not_told_of_the_whole(untold: str) -> None:
    bare = {"sampled_ids": None, "logprobs": None, "versions": []}
    first = turn("ab", "p", "1", **(bare if untold == "first" else {}))
    rest = turn("cd", "pab", "1", **(bare if untold == "rest" else {}))
    whole = merge(first, rest)
    assert (whole.prompt_ids, whole.sampled_ids, whole.logprobs) == (None, None, None)
    assert whole.reply["content"] == "abcd"


def test_a_turn_that_is_cut_short_keeps_what_belongs_to_its_tokens() -> None:
    short = cut(turn("abcd", "p", "1", "2"), 3)
    assert short.sampled_ids == encode("abc")
    assert short.logprobs == [-97.0, -98.0, -99.0]
    assert short.versions == [VersionSpan("1", 0, 2), VersionSpan("2", 2, 3)]
    assert cut(short, 2).versions == [VersionSpan("1", 0, 2)]


async def read(sampled: str, *, ends: bool = True, finish_reason: str = "stop", **body: Any) -> Whole | None:
    ids = encode(sampled) + [TURN_END] * ends
    async with ScriptedEngine(lambda _: "") as engine, admin_client(None) as http:
        asked = turn("", sampled_ids=ids, finish_reason=finish_reason)
        return await EngineReading(WorkerAdmin(http, engine.url), asked, body).message()


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        ("END", "so ", 6),
        (["xx", "END"], "so ", 6),
        (["of", "END"], "so ", 6),
        (["it"], "so END of ", 12),
        (["zz"], "so END of it", 13),
        ([], "so END of it", 13),
    ],
)
async def test_a_stop_string_ends_the_turn_at_the_token_that_completes_it(
    stop: Any, text: str, num_tokens: int
) -> None:
    whole = await read("so END of it", stop=stop)
    assert whole == Whole({"role": "assistant", "content": text}, "stop", num_tokens)


async def test_a_turn_of_its_end_token_alone_says_nothing() -> None:
    assert await read("") == Whole({"role": "assistant", "content": ""}, "stop", 1)


async def test_a_stop_string_may_be_kept() -> None:
    whole = await read("so END of it", stop="END", no_stop_trim=True)
    assert whole is not None
    assert (whole.message["content"], whole.num_tokens) == ("so END", 6)


async def test_a_stop_string_is_found_in_what_ran_out_of_budget() -> None:
    whole = await read("so END of", ends=False, finish_reason="length", stop="END")
    assert whole == Whole({"role": "assistant", "content": "so "}, "stop", 6)
    whole = await read("so EN", ends=False, finish_reason="length", stop="END")
    assert whole == Whole({"role": "assistant", "content": "so EN"}, "length", 5)


@pytest.mark.parametrize("status", [404, 500])
async def test_an_engine_that_cannot_turn_tokens_into_text_is_not_insisted_on(status: int) -> None:
    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async with serve_app(refuse) as port, admin_client(None) as http:
        assert await EngineReading(WorkerAdmin(http, f"http://127.0.0.1:{port}"), turn("ab"), {}).message() is None
