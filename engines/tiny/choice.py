"""One choice put together from its pieces, and what SGLang tells about it beside its text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.engines.tiny.calls import Call, FinishReason, Piece
from forebay.engines.tiny.sampling import TokenChoice
from forebay.engines.tiny.wire import JSONObject


@dataclass(slots=True)
class Choice:
    """One choice, put together from its pieces."""

    text: str = ""
    tokens: list[TokenChoice] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    versions: list[str] = field(default_factory=list)
    num_retractions: int = 0

    def add(self, piece: Piece) -> None:
        """Grow by a piece."""
        self.text += piece.text
        self.tokens.extend(piece.tokens)
        self.versions.extend(piece.versions)
        self.num_tokens = piece.num_tokens
        self.num_retractions = piece.num_retractions
        self.finish_reason, self.matched_stop = piece.finish_reason, piece.matched_stop

    @property
    def token_ids(self) -> list[int]:
        """What was sampled."""
        return [token.token_id for token in self.tokens]


def generated(call: Call, choice: Choice, version: str, *, tokenizer: Any = None, with_logprobs: bool) -> JSONObject:
    """One reply, as far as it has come; logprobs carry their token's text where a tokenizer is given."""
    return {
        "text": choice.text,
        "output_ids": choice.token_ids,
        "meta_info": meta_info(call, choice, version, tokenizer=tokenizer, with_logprobs=with_logprobs),
    }


def weight_metadata(versions: Sequence[str], current: str) -> JSONObject:
    """Which weights gave which tokens, as SGLang tells it: of the first choice, and the newest of them by itself."""
    spans: list[JSONObject] = []
    for at, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = at + 1
        else:
            spans.append({"version": version, "start": at, "end": at + 1})
    spans = spans or [{"version": current, "start": 0, "end": 0}]
    return {"weight_version": spans[-1]["version"], "weight_versions": spans}


def meta_info(
    call: Call, choice: Choice, version: str, *, tokenizer: Any = None, with_logprobs: bool = False
) -> JSONObject:
    """What is told beside the text; ``version`` names the weights of now. The spans of weights come with the last."""
    told: JSONObject = {
        "id": call.rid,
        "finish_reason": _finish(choice),
        "prompt_tokens": len(call.prompt_ids),
        "num_retractions": choice.num_retractions,
        "reasoning_tokens": 0,
        "completion_tokens": choice.num_tokens,
        "cached_tokens": 0,
        **weight_metadata(choice.versions, version),
    }
    if choice.finish_reason is None:
        del told["weight_versions"]
    return told | (_logprobs(call, choice, tokenizer) if with_logprobs else {})


def _logprobs(call: Call, choice: Choice, tokenizer: Any) -> JSONObject:
    output = [[token.logprob, token.token_id, _text(token.token_id, tokenizer)] for token in choice.tokens]
    asked = [] if call.logprob_start is None else call.prompt_ids[call.logprob_start :]
    scored: Sequence[float | None] = (None, *call.prompt_logprobs)
    given = zip(scored, asked, strict=True) if asked else ()
    return {
        "input_token_logprobs": [[logprob, token, _text(token, tokenizer)] for logprob, token in given],
        "output_token_logprobs": output,
        "output_token_logprobs_length": len(output),
    }


def _text(token_id: int, tokenizer: Any) -> str | None:
    return None if tokenizer is None else str(tokenizer.decode([token_id], clean_up_tokenization_spaces=False))


def _finish(choice: Choice) -> JSONObject | None:
    match choice.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": choice.num_tokens}
        case "abort":
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        case "stop":
            return {"type": "stop", "matched": choice.matched_stop}
