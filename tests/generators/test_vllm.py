"""What a rollout function's calls of a vLLM that was started without flags leave in its samples."""

from typing import Any

from forebay.engines.scripted import Reply
from forebay.engines.scripted.tokens import TURN_END, encode
from tests.engines.fake_vllm import FakeVLLM, RenderLater
from tests.generators.partial_kit import check_tokens, sample_of

SAID = [*encode("one two three"), TURN_END]


class Unflagged(FakeVLLM):
    """Started without a flag."""

    dev_mode = scale_out = False


async def test_an_aborted_turn_keeps_its_tokens_when_its_continuation_is_interrupted(buffer, write_rows) -> None:
    def script(call: Any) -> Reply:
        return Reply(text="one ", finish_reason="abort") if not call.said else Reply(text="two three")

    sample, _ = await sample_of(script, buffer, write_rows, kind=RenderLater)
    check_tokens(sample, SAID)


async def test_without_its_flags_an_aborted_turn_goes_on_from_the_text(buffer, write_rows) -> None:
    def script(call: Any) -> Reply:
        return Reply(text="one ", finish_reason="abort") if not call.said else Reply(text="two")

    sample, bodies = await sample_of(script, buffer, write_rows, kind=Unflagged)
    assert "tokens" not in sample
    assert sample["messages"][-1]["content"] == "one two"
    assert bodies[-1]["continue_final_message"] is True
    # One token was spent to learn that it does not go on from tokens.
    assert [body.get("max_completion_tokens") for body in bodies] == [None, 1, None]


async def test_without_its_flags_a_whole_reply_has_its_tokens_and_logprobs_of_an_unknown_kind(
    buffer, write_rows
) -> None:
    sample, (body,) = await sample_of(lambda _: "one two three", buffer, write_rows, kind=Unflagged)
    check_tokens(sample, SAID)
    assert len(body["cache_salt"]) <= 128
    (span,) = [span for span in sample["token_spans"] if span["source"] == "llm"]
    assert span["sampling"] == span["sampling"] | {"logprobs": None}
