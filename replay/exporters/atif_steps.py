"""Makes the steps of an ATIF trajectory from the messages and tokens of a sample."""

import mimetypes
from array import array
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from math import isfinite
from typing import Any, NamedTuple

import msgspec

from forebay.engines.capture.sample_fields import TokenSpan
from forebay.replay.exporters.rollouts import Json, RolloutSample

_SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
_IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")


class SampledTurn(NamedTuple):
    """The tokens ``[start, end)`` of a sample, which one call of an engine sampled."""

    start: int
    end: int
    versions: Sequence[int | None]
    """The weight versions that sampled them; None where it is unknown."""


def spans_of(sample: RolloutSample) -> list[TokenSpan]:
    """The ``token_spans`` of a sample; none if it has no valid ones."""
    try:
        spans = msgspec.convert(sample.fields.get("token_spans"), list[TokenSpan])
    except msgspec.ValidationError:  # another writer's field of this name, or none
        return []
    ends = [0, *(end for span in spans for end in (span.start, span.end)), sample.arrays.num_tokens]
    return spans if ends == sorted(ends) else []


def sampled_turns(sample: RolloutSample) -> list[SampledTurn]:
    """The turns of a sample, from its ``token_spans``; without them, the stretches that its loss mask trains on.

    None of them if the tokens before the first turn are unknown.
    """
    if spans := spans_of(sample):
        turns = [
            SampledTurn(of_turn[0].start, of_turn[-1].end, [*dict.fromkeys(each.weight_version for each in of_turn)])
            for is_sampled, found in groupby(spans, lambda span: span.source == "llm")
            if is_sampled and (of_turn := list(found))
        ]
    else:
        mask = b"".join(sample.arrays.loss_mask)
        edges = [at for at, (one, other) in enumerate(pairwise(b"\0" + mask + b"\0")) if bool(one) != bool(other)]
        turns = [SampledTurn(start, end, ()) for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return turns if turns and turns[0].start else []


class StepTokens:
    """The tokens of a sample, as metrics of the steps that sampled them."""

    def __init__(self, sample: RolloutSample) -> None:
        arrays = sample.arrays
        self.ids = _numbers("i", bytes(arrays.tokens))
        self.logprobs = _numbers("f", b"".join(arrays.logprobs)) if arrays.has_logprobs else None
        self.mask = b"".join(arrays.loss_mask)
        self.turns = sampled_turns(sample)

    def metrics(self, number: int) -> Json:
        """Metrics of the turn with this number: its tokens, and those between it and the turn before.

        The first turn has its whole prompt. Later ones have in ``extra`` what their prompts add.
        """
        start, end, versions = self.turns[number]
        before = self.turns[number - 1].end if number else 0
        own = self.logprobs[start:end] if self.logprobs is not None else [float("nan")]
        new = self.ids[before:start]
        extra = {
            "weight_versions": versions,
            "new_prompt_token_ids": new if number else None,
            "loss_mask": None if all(self.mask[start:end]) else list(self.mask[start:end]),
        }
        return _known(
            prompt_tokens=start,
            completion_tokens=end - start,
            prompt_token_ids=None if number else new,
            completion_token_ids=self.ids[start:end],
            logprobs=own if all(map(isfinite, own)) else None,
            extra=_known(**extra) or None,
        )


def steps_of(sample: RolloutSample, tokens: StepTokens) -> tuple[list[Json], bool]:
    """The steps of a sample, and whether they have its tokens.

    The last messages of the assistant are those of the sampled turns: earlier ones were part of a prompt. Steps have no
    tokens if there are more turns than such messages.
    """
    messages = [each if isinstance(each, dict) else {"content": each} for each in sample.fields["messages"]]
    num_replies = sum(message.get("role") == "assistant" for message in messages)
    has_tokens = bool(tokens.turns) and len(tokens.turns) <= num_replies
    first = num_replies - len(tokens.turns)
    steps: list[Json] = []
    at = 0
    for message in messages:
        agents = [step for step in steps[-1:] if step["source"] == "agent"]
        if message.get("role") in ("tool", "function") and agents:
            _observe(agents[0], message)
            continue
        step = _step(len(steps) + 1, message)
        if step["source"] == "agent":
            if has_tokens and at >= first:
                step |= {"metrics": tokens.metrics(at - first), "llm_call_count": 1}
            elif has_tokens:
                step["is_copied_context"] = True
            at += 1
        steps.append(step)
    return steps or [{"step_id": 1, "source": "system", "message": ""}], has_tokens


def _step(number: int, message: Json) -> Json:
    role = message.get("role")
    source = _SOURCES.get(str(role), "user")
    step: Json = {"step_id": number, "source": source, "message": _content(message.get("content"))}
    if str(role) not in _SOURCES:
        step["extra"] = {"role": role}
    if source == "agent":
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        calls = message.get("tool_calls")
        given = [each for each in (calls if isinstance(calls, list) else ()) if isinstance(each, dict)]
        made = [_call(f"call-{number}-{at}", each) for at, each in enumerate(given)]
        step |= _known(reasoning_content=reasoning if isinstance(reasoning, str) else None, tool_calls=made or None)
    return step


def _call(default_id: str, given: Json) -> Json:
    function = given.get("function")
    function = function if isinstance(function, dict) else {}
    arguments = function.get("arguments")
    try:
        parsed = msgspec.json.decode(arguments) if isinstance(arguments, str) else arguments
    except (msgspec.DecodeError, RecursionError):
        parsed = None
    return {
        "tool_call_id": str(given.get("id") or default_id),
        "function_name": str(function.get("name") or ""),
        "arguments": parsed if isinstance(parsed, dict) else _known(arguments=arguments),
    }


def _observe(step: Json, message: Json) -> None:
    """Add the result of a tool to the step that called it."""
    call_id = message.get("tool_call_id")
    is_of_step = call_id in [call["tool_call_id"] for call in step.get("tool_calls", ())]
    result = {"content": _content(message.get("content"))} | ({"source_call_id": call_id} if is_of_step else {})
    step.setdefault("observation", {"results": []})["results"].append(result)


def _content(content: Any) -> str | list[Json]:
    if content is None or isinstance(content, str):
        return content or ""
    return list(_parts(content)) if isinstance(content, list) else _json_text(content)


def _parts(content: Sequence[Any]) -> Iterator[Json]:
    for given in content:
        part = given if isinstance(given, dict) else {"text": given if isinstance(given, str) else _json_text(given)}
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
        if isinstance(part.get("text"), str):
            yield {"type": "text", "text": part["text"]}
        elif isinstance(url, str) and (kind := mimetypes.guess_type(url)[0]) in _IMAGE_TYPES:
            yield {"type": "image", "source": {"media_type": kind, "path": url}}
        else:
            yield {"type": "text", "text": _json_text(part)}


def _json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _numbers(code: str, data: bytes) -> list[Any]:
    numbers: array[Any] = array(code)
    numbers.frombytes(data)
    return numbers.tolist()


def _known(**given: Any) -> Json:
    return {name: value for name, value in given.items() if value is not None and value != []}
