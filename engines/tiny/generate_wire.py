"""``POST /generate``: SGLang's own route, by text or by token ids, alone or in a list."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from forebay.engines.tiny.wire import UNSUPPORTED, Body, TokenIds, with_text, without_unsupported

DEFAULT_NEW_TOKENS = 128
"""SGLang's own."""


class GenerateParams(BaseModel):
    """The sampling parameters of ``/generate``; a field that SGLang does not have is refused, as there."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: Annotated[int, Field(ge=0)] | None = DEFAULT_NEW_TOKENS
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    sampling_seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: Annotated[int, Field(ge=1)] = 1
    skip_special_tokens: Literal[True] = True
    spaces_between_special_tokens: Literal[True] = True

    @model_validator(mode="before")
    @classmethod
    def _nothing_unsupported(cls, params: Any) -> Any:
        if not isinstance(params, dict):
            return params
        return {name: value for name, value in without_unsupported(params).items() if name not in UNSUPPORTED}

    @field_validator("stop")
    @classmethod
    def _stop_has_text(cls, stop: str | list[str] | None) -> str | list[str] | None:
        return with_text(stop)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class GenerateBody(Body):
    """The body; ``input_ids`` go before ``text``. ``logprob_start_len`` -1 scores nothing of the prompt."""

    text: str | list[str] | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(min_length=1)] | None = None
    sampling_params: GenerateParams | list[GenerateParams] = GenerateParams()
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = -1
    return_text_in_logprobs: bool = False
    stream: bool = False
    rid: str | list[str] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.text is None and self.input_ids is None:
            raise ValueError("Either text, input_ids or input_embeds should be provided.")
        num_prompts = len(self.prompts)
        if not num_prompts:
            raise ValueError("text is an empty list: it needs one prompt at least")
        for name in ("sampling_params", "rid"):
            told = getattr(self, name)
            if isinstance(told, list) and len(told) != num_prompts:
                raise ValueError(f"{name} has {len(told)} entries for {num_prompts} prompts")
        if self.stream and num_prompts > 1:
            raise ValueError("the embedded engine streams one prompt at a time")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as token ids."""
        given: Any = self.text if self.input_ids is None else self.input_ids
        return list(given) if self.is_list else [given]

    @property
    def is_list(self) -> bool:
        """Whether several prompts were given, or one in a list."""
        if self.input_ids is None:
            return isinstance(self.text, list)
        return isinstance(self.input_ids[0], list)

    def params_of(self, index: int) -> GenerateParams:
        """The sampling parameters of a prompt."""
        return self.sampling_params[index] if isinstance(self.sampling_params, list) else self.sampling_params

    def rid_of(self, index: int) -> str | None:
        """The request id of a prompt: SGLang numbers the prompts of a list below one id."""
        if isinstance(self.rid, list):
            return self.rid[index]
        return f"{self.rid}_{index}" if self.rid and self.is_list else self.rid

    @property
    def logprob_start(self) -> int | None:
        """The first token of the prompt to score."""
        start = -1 if self.logprob_start_len is None else self.logprob_start_len
        return start if self.return_logprob and start >= 0 else None
