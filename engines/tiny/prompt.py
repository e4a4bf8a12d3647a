"""From the bodies of chats and of ``/generate`` to calls: prompts are encoded and checked, parameters filled in."""

from collections.abc import Sequence
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.engines.tiny.calls import Call
from forebay.engines.tiny.extra import require
from forebay.engines.tiny.model import LoadedModel
from forebay.engines.tiny.request_bodies import ChatBody, GenerateBody, GenerateParams, JSONObject, Message, new_rid
from forebay.engines.tiny.sampling import SamplingParams

TokenIds = tuple[int, ...]


def encode_chat(
    tokenizer: Any, given: Sequence[Message], tools: list[JSONObject], *, is_continued: bool = False
) -> TokenIds:
    """The tokens of a chat's prompt. A message to be continued is the open end of it, as in SGLang."""
    messages = [message.rendered() for message in given]
    partial = messages.pop()["content"] if is_continued else ""
    try:
        prompt = tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
    except (require("jinja2").TemplateError, TypeError, RecursionError) as error:
        raise InvalidInput(f"the model's chat template refuses these messages: {error}", field="messages") from error
    return tuple(tokenizer.encode(prompt + partial, add_special_tokens=False))


def encode_prompt(tokenizer: Any, body: ChatBody) -> TokenIds:
    """The tokens of the prompt of a chat."""
    if body.input_ids is not None:
        return tuple(body.input_ids)
    return encode_chat(tokenizer, body.messages, body.shown_tools, is_continued=body.continue_final_message)


def encode_prompts(tokenizer: Any, body: GenerateBody) -> list[TokenIds]:
    """The tokens of each prompt of ``/generate``."""
    return [tuple(tokenizer.encode(told) if isinstance(told, str) else told) for told in body.prompts]


def build_call(model: LoadedModel, body: ChatBody, prompt_ids: TokenIds, max_rows: int) -> Call:
    """The call for a chat; ``InvalidInput`` where it does not fit the context or the batch."""
    n = body.n or 1
    _check_rows(n, max_rows)
    max_tokens = _max_tokens(model, prompt_ids, body.limit, "messages" if body.input_ids is None else "input_ids")
    return Call(
        rid=body.rid or new_rid(),
        prompt_ids=prompt_ids,
        params=_params(body, max_tokens),
        n=n,
        stream=bool(body.stream),
        num_top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
    )


def build_calls(model: LoadedModel, body: GenerateBody, prompts: list[TokenIds], max_rows: int) -> list[Call]:
    """The calls for ``/generate``, one for each prompt; ``InvalidInput`` as above."""
    calls = []
    for index, prompt_ids in enumerate(prompts):
        params = body.params_of(index)
        _check_rows(params.n, max_rows)
        max_tokens = _max_tokens(model, prompt_ids, params.max_new_tokens, "input_ids")
        start = body.logprob_start
        calls.append(
            Call(
                rid=body.rid_of(index) or new_rid(),
                prompt_ids=prompt_ids,
                params=_generate_params(params, max_tokens),
                n=params.n,
                stream=body.stream,
                logprob_start=None if start is None else min(start, len(prompt_ids) - 1),
            )
        )
    return calls


def check_tokens(model: LoadedModel, tokens: Sequence[int], field: str) -> None:
    """Raise ``InvalidInput`` for a token that the model does not have. SGLang 0.5.23 may die of one."""
    if max(tokens, default=0) >= model.vocabulary_size:
        told = f"token {max(tokens)} is none of the {model.vocabulary_size} tokens of this model"
        raise InvalidInput(told, field=field)


def _params(body: ChatBody, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=-1 if body.top_k is None else body.top_k,
        seed=body.seed,
        stop=body.stops,
        ignore_eos=body.ignore_eos,
    )


def _generate_params(params: GenerateParams, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=params.sampling_seed,
        stop=params.stops,
        stop_token_ids=frozenset(params.stop_token_ids or ()),
        ignore_eos=params.ignore_eos,
    )


def _check_rows(n: int, max_rows: int) -> None:
    if n > max_rows:
        raise InvalidInput(f"n is {n}; this engine generates at most {max_rows} choices at once", field="n")


def _max_tokens(model: LoadedModel, prompt_ids: TokenIds, wanted: int | None, field: str) -> int:
    num_prompt = len(prompt_ids)
    room = model.context_length - num_prompt
    if num_prompt == 0:
        raise InvalidInput("the prompt has no tokens", field=field)
    check_tokens(model, prompt_ids, field)
    if room < (1 if wanted is None else wanted):
        told = f" and {wanted} to generate" if wanted else ""
        raise InvalidInput(
            f"the context of this model is {model.context_length} tokens; asked were {num_prompt} of prompt{told}",
            field=field if room < 1 else "max_tokens",
        )
    return room if wanted is None else wanted
