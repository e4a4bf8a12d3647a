"""The interface of an engine behind the HTTP interface."""

from collections.abc import Sequence
from typing import Protocol

from forebay.core.weight_versions import PauseMode
from forebay.engines.fake_sglang.calls import JSONObject, PromptCall
from forebay.engines.fake_sglang.request_bodies import ChatBody, GenerateBody, WeightsBody

FIRST_VERSION = "default"
"""SGLang's name for the weights it was started with."""


class Administered(Protocol):
    """What ``Administration`` needs. Called only on the event loop that serves."""

    def abort(self, rid_prefix: str) -> None:
        """Abort calls whose ``rid`` begins with the prefix, keeping their tokens; "" matches all."""

    async def pause(self, mode: PauseMode) -> None:
        """Pause generation; new calls wait. Returns once generation has stopped."""

    async def resume(self) -> None:
        """Resume after a pause."""

    async def update_weights(self, body: WeightsBody) -> None:
        """Load other weights. Raises ``InvalidInput``, changing nothing, if they do not fit."""

    async def name_weights(self, version: str) -> None:
        """Rename the weights from the next token on."""

    async def flush_cache(self) -> None:
        """Clear the prompt cache."""


class Backend(Administered, Protocol):
    """An engine without its HTTP interface. Called only on the event loop that serves."""

    @property
    def name(self) -> str:
        """Model name in requests and replies."""

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a prompt and its answer."""

    @property
    def vocabulary_size(self) -> int:
        """Exclusive upper bound of token ids."""

    @property
    def max_choices(self) -> int:
        """Maximum number of choices per prompt."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine answers calls."""

    @property
    def tells_textless_logprobs(self) -> bool:
        """Whether streams have a chunk for logprobs of tokens without text, as SGLang's have if it has a parser."""

    @property
    def has_metrics(self) -> bool:
        """Whether replies report queue and processing times, as SGLang's do under ``--enable-metrics``."""

    @property
    def weight_version(self) -> str:
        """Current name of the weights."""

    def refuse_unserved(self, body: ChatBody | GenerateBody) -> None:
        """Raise ``InvalidInput`` for a feature that SGLang supports and this engine does not."""

    async def encode(self, text: str) -> Sequence[int]:
        """Return the tokens of a text."""

    async def encode_chat(
        self, messages: Sequence[JSONObject], tools: Sequence[JSONObject], *, is_continued: bool
    ) -> Sequence[int]:
        """Return a chat's prompt tokens; ``is_continued`` leaves the last message open. Raises ``InvalidInput``."""

    async def decode(self, tokens: Sequence[int], *, with_marks: bool) -> str:
        """Return the text of tokens, with or without the chat template's special tokens."""

    def token_text(self, token: int) -> str:
        """Return the text of one token."""

    def submit(self, call: PromptCall) -> None:
        """Start a call; its pieces follow. Raises ``EngineUnavailable`` if the engine no longer answers."""

    def cancel(self, call: PromptCall) -> None:
        """End a call that has ended or whose client is gone."""

    def model_info(self) -> JSONObject:
        """Return this engine's fields of ``/model_info``, at least ``model_path``."""

    def server_info(self) -> JSONObject:
        """Return this engine's additional fields of ``/server_info``."""

    def load(self) -> JSONObject:
        """Return this engine's fields of ``/v1/loads``, at least ``num_running_reqs`` and ``num_waiting_reqs``."""
