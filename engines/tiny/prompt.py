"""From a chat body to a call: the prompt is rendered, counted against the context, and the parameters are filled in."""

from typing import Any

from forebay.core.errors import InvalidInput
from forebay.engines.tiny.calls import Call
from forebay.engines.tiny.extra import require
from forebay.engines.tiny.model import LoadedModel
from forebay.engines.tiny.sampling import SamplingParams
from forebay.engines.tiny.wire import ChatBody, new_rid


def encode_prompt(tokenizer: Any, body: ChatBody) -> tuple[int, ...]:
    """The tokens of the prompt. A message to be continued is the open end of it, as in SGLang."""
    messages = [message.rendered() for message in body.messages]
    partial = messages.pop()["content"] if body.continue_final_message else ""
    try:
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except require("jinja2").TemplateError as error:
        raise InvalidInput(f"the model's chat template refuses these messages: {error}", field="messages") from error
    return tuple(tokenizer.encode(prompt + partial, add_special_tokens=False))


def build_call(model: LoadedModel, body: ChatBody, prompt_ids: tuple[int, ...], max_rows: int) -> Call:
    """The call for a body; ``InvalidInput`` where it does not fit the context or the batch."""
    n = body.n or 1
    if n > max_rows:
        raise InvalidInput(f"n is {n}; this engine generates at most {max_rows} choices at once", field="n")
    return Call(
        rid=body.rid or new_rid(),
        prompt_ids=prompt_ids,
        params=_params(body, _max_tokens(model, body, len(prompt_ids))),
        n=n,
        stream=bool(body.stream),
        num_top_logprobs=(body.top_logprobs or 0) if body.logprobs else 0,
    )


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


def _max_tokens(model: LoadedModel, body: ChatBody, num_prompt: int) -> int:
    room = model.context_length - num_prompt
    wanted = body.limit
    if num_prompt == 0:
        raise InvalidInput("the prompt has no tokens", field="messages")
    if room < (wanted or 1):
        told = f" and {wanted} to generate" if wanted else ""
        raise InvalidInput(
            f"the context of this model is {model.context_length} tokens; asked were {num_prompt} of prompt{told}",
            field="messages" if room < 1 else "max_tokens",
        )
    return wanted or room
