"""From a request to the calls that it makes: its prompts encoded, and checked against what the engine holds."""

import asyncio
from collections.abc import Sequence
from uuid import uuid4

from forebay.core.errors import InvalidInput
from forebay.engines.fake_sglang.backend import Backend
from forebay.engines.fake_sglang.calls import Piece, PromptCall
from forebay.engines.fake_sglang.request_bodies import ChatBody, GenerateBody


async def chat_call(backend: Backend, body: ChatBody, traceparent: str | None = None) -> PromptCall:
    """The call of a chat; ``InvalidInput`` where it cannot be served."""
    backend.refuse_unserved(body)
    if body.input_ids is not None:
        prompt_ids: Sequence[int] = body.input_ids
    else:
        # As in SGLang, which looks at the flag only where the assistant has spoken last.
        is_continued = body.continue_final_message and body.messages[-1].get("role") == "assistant"
        prompt_ids = await backend.encode_chat(body.messages, body.shown_tools, is_continued=is_continued)
    _check_num_choices(backend, body.n or 1)
    field = "messages" if body.input_ids is None else "input_ids"
    return PromptCall(
        rid=body.rid or uuid4().hex,
        prompt_ids=tuple(prompt_ids),
        params=body.sampling(_max_tokens(backend, prompt_ids, body.limit, field)),
        n=body.n or 1,
        stream=bool(body.stream),
        num_top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
        body=body.given,
        is_chat=True,
        extra_key=body.extra_key,
        arrived_s=body.arrived_s,
        traceparent=traceparent,
    )


async def generate_calls(backend: Backend, body: GenerateBody, traceparent: str | None = None) -> list[PromptCall]:
    """The calls of ``/generate``, one for each prompt; ``InvalidInput`` as above."""
    backend.refuse_unserved(body)
    calls: list[PromptCall] = []
    # One queue, so that a stream of a list gives each piece as it comes.
    pieces: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
    first_index = 0
    for at, prompt in enumerate(body.prompts):
        prompt_ids = tuple(await backend.encode(prompt) if isinstance(prompt, str) else prompt)
        params = body.params_of(at)
        _check_num_choices(backend, params.n)
        max_tokens = _max_tokens(backend, prompt_ids, params.max_new_tokens, "input_ids")
        start = body.logprob_start
        calls.append(
            PromptCall(
                rid=body.rid_of(at) or uuid4().hex,
                prompt_ids=prompt_ids,
                params=params.sampling(max_tokens),
                n=params.n,
                first_index=first_index,
                stream=body.stream,
                # Asked for past its end, the prompt is scored from its last token on.
                logprob_start=None if start is None else min(start, len(prompt_ids) - 1),
                body={**body.given, "rid": body.rid_of(at), "sampling_params": params.given},
                extra_key=body.extra_key,
                arrived_s=body.arrived_s,
                traceparent=traceparent,
                pieces=pieces,
            )
        )
        first_index += params.n
    return calls


def check_tokens(backend: Backend, tokens: Sequence[int], field: str) -> None:
    """Raise ``InvalidInput`` for a token that the model does not have. SGLang 0.5.23 may die of one."""
    if max(tokens, default=0) >= backend.vocabulary_size:
        message = f"token {max(tokens)} is none of the {backend.vocabulary_size} tokens of this model"
        raise InvalidInput(message, field=field)


def _check_num_choices(backend: Backend, n: int) -> None:
    if n > backend.max_choices:
        message = f"n is {n}; this engine generates at most {backend.max_choices} choices at once"
        raise InvalidInput(message, field="n")


def _max_tokens(backend: Backend, prompt_ids: Sequence[int], wanted: int | None, field: str) -> int:
    num_prompt = len(prompt_ids)
    room = backend.context_length - num_prompt
    if num_prompt == 0:
        raise InvalidInput("the prompt has no tokens", field=field)
    check_tokens(backend, prompt_ids, field)
    if room < (1 if wanted is None else wanted):
        asked = f"{num_prompt} of prompt{f' and {wanted} to generate' if wanted else ''}"
        raise InvalidInput(
            f"the context of this model is {backend.context_length} tokens; asked were {asked}",
            field=field if room < 1 else "max_tokens",
        )
    return room if wanted is None else wanted
