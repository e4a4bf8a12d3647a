"""Request formats: OpenAI's chat with SGLang's additional fields, and SGLang's own routes.

Fields that are not declared here are ignored, unless the engine rejects them.
"""

import time
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from forebay.core.weight_versions import PauseMode
from forebay.engines.fake_sglang.calls import JSONObject, SamplingParams
from forebay.web.request_models import invalid, parse_object

DEFAULT_NEW_TOKENS = 128
"""SGLang's default."""

WHOLE_ONLY = ("return_token_ids", "return_prompt_token_ids", "return_meta_info")
"""Fields that SGLang returns only for chats that are not streamed."""

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class Body(BaseModel):
    """The body of a request; ``given`` is the original JSON."""

    model_config = ConfigDict(protected_namespaces=())

    _given: JSONObject = PrivateAttr(default_factory=dict)
    _arrived_s: float = PrivateAttr(default_factory=time.monotonic)

    @classmethod
    def read(cls, data: bytes) -> Self:
        """Parse a request body. Raises ``InvalidInput`` for the first invalid field."""
        given = parse_object(data)
        try:
            body = cls.model_validate(given)
        except ValidationError as error:
            raise invalid(error) from None
        body._given = given
        return body

    @property
    def given(self) -> JSONObject:
        """The client's JSON, including undeclared fields."""
        return self._given

    @property
    def arrived_s(self) -> float:
        """When the request arrived, by ``time.monotonic``."""
        return self._arrived_s


class SamplingFields(BaseModel):
    """Fields with the same names in a chat and in ``/generate``."""

    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1)] | None = -1
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False

    @field_validator("stop")
    @classmethod
    def _stop_has_text(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if stop is not None and "" in ([stop] if isinstance(stop, str) else stop):
            raise ValueError("a stop string cannot be empty")
        return stop

    def _sampling(self, max_tokens: int, seed: int | None) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=-1 if self.top_k is None else self.top_k,
            seed=seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )


class StreamOptions(BaseModel):
    """What a stream contains in addition to its text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class ChatBody(Body, SamplingFields):
    """``POST /v1/chat/completions``. ``rid`` names the call for ``/abort_request``.

    ``input_ids`` are the prompt's tokens and replace the rendered messages. ``tools`` are given to the chat template.
    """

    messages: Annotated[list[JSONObject], Field(min_length=1)]
    input_ids: TokenIds | None = None
    tools: list[JSONObject] | None = None
    tool_choice: str | JSONObject | None = None
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1)] | None = 1
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=128)] | None = 0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    rid: str | None = None
    extra_key: str | None = None
    continue_final_message: bool = False
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    return_input_ids_in_sglext: bool = False
    return_output_ids_in_sglext: bool = False

    @model_validator(mode="after")
    def _token_ids_come_whole(self) -> Self:
        for name in WHOLE_ONLY:
            if self.stream and getattr(self, name):
                raise ValueError(
                    f"{name} is not supported with streaming. Please set stream=false when using {name}=true."
                )
        return self

    @property
    def shown_tools(self) -> list[JSONObject]:
        """The tools given to the chat template: none, all, or the one named by ``tool_choice``."""
        if self.tool_choice == "none":
            return []
        chosen = _function_name(self.tool_choice) if isinstance(self.tool_choice, dict) else None
        return [tool for tool in self.tools or [] if chosen in (None, _function_name(tool))]

    @property
    def limit(self) -> int | None:
        """Maximum number of tokens to generate, if the client set one."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Return its sampling parameters."""
        return self._sampling(max_tokens, self.seed)


def _function_name(tool: JSONObject) -> object:
    function = tool.get("function")
    return function.get("name") if isinstance(function, dict) else None


class GenerateParams(SamplingFields):
    """The sampling parameters of ``/generate``; ``model_extra`` holds undeclared ones."""

    model_config = ConfigDict(extra="allow")

    max_new_tokens: Annotated[int, Field(ge=0)] | None = DEFAULT_NEW_TOKENS
    sampling_seed: int | None = None
    n: Annotated[int, Field(ge=1)] = 1

    @property
    def given(self) -> JSONObject:
        """The client's own fields."""
        return self.model_dump(exclude_unset=True)

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Return the parameters of the tokens to sample."""
        return self._sampling(max_tokens, self.sampling_seed)


class GenerateBody(Body):
    """``POST /generate``: ``input_ids`` override ``text``; each is one prompt or a list.

    ``logprob_start_len`` -1 scores nothing of the prompt.
    """

    text: str | list[str] | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(min_length=1)] | None = None
    sampling_params: GenerateParams | list[GenerateParams] | None = None
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = -1
    return_text_in_logprobs: bool = False
    stream: bool = False
    rid: str | list[str] | None = None
    extra_key: str | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.text is None and self.input_ids is None:
            raise ValueError("Either text, input_ids or input_embeds should be provided.")
        num_prompts = len(self.prompts)
        if not num_prompts:
            raise ValueError("text must contain at least one prompt (got an empty list)")
        for name in ("sampling_params", "rid"):
            entries = getattr(self, name)
            if isinstance(entries, list) and len(entries) != num_prompts:
                raise ValueError(f"{name} has {len(entries)} entries for {num_prompts} prompts")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids."""
        prompts: Any = self.text if self.input_ids is None else self.input_ids
        return list(prompts) if self.is_list else [prompts]

    @property
    def is_list(self) -> bool:
        """Whether the request has a list of prompts."""
        # A list with one prompt is answered with a list of one reply.
        if self.input_ids is None:
            return isinstance(self.text, list)
        return isinstance(self.input_ids[0], list)

    def params_of(self, index: int) -> GenerateParams:
        """Return the sampling parameters of a prompt."""
        params = self.sampling_params or GenerateParams()
        return params[index] if isinstance(params, list) else params

    def rid_of(self, index: int) -> str | None:
        """Return the request id of a prompt: SGLang appends the index if a list shares one id."""
        if isinstance(self.rid, list):
            return self.rid[index]
        return f"{self.rid}_{index}" if self.rid and self.is_list else self.rid

    @property
    def logprob_start(self) -> int | None:
        """Position of the first prompt token to score, or None."""
        start = -1 if self.logprob_start_len is None else self.logprob_start_len
        return start if self.return_logprob and start >= 0 else None


class AbortBody(Body):
    """``POST /abort_request``: calls whose ``rid`` begins with this ``rid``, or all calls."""

    rid: str | None = None
    abort_all: bool = False


class PauseBody(Body):
    """``POST /pause_generation``."""

    mode: PauseMode = "abort"


class WeightsBody(Body):
    """``POST /update_weights_from_disk``; SGLang's other fields have no effect here and are ignored."""

    model_path: Annotated[str, Field(min_length=1)]
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class VersionBody(Body):
    """``POST /update_weight_version``."""

    new_version: str
    abort_all_requests: bool = False


class TokenizeBody(Body):
    """``POST /tokenize``: a text, or the messages of a chat."""

    prompt: str | None = None
    messages: Annotated[list[JSONObject], Field(min_length=1)] | None = None
    tools: list[JSONObject] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of prompt and messages must be given")
        return self


class DetokenizeBody(Body):
    """``POST /detokenize``."""

    tokens: list[Annotated[int, Field(ge=0)]] | list[list[Annotated[int, Field(ge=0)]]]
    skip_special_tokens: bool = True
