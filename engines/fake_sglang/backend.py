"""What an engine behind the face can do."""

from collections.abc import Sequence
from typing import Protocol

from forebay.core.weight_versions import PauseMode
from forebay.engines.fake_sglang.calls import JSONObject, PromptCall
from forebay.engines.fake_sglang.request_bodies import ChatBody, GenerateBody, WeightsBody

FIRST_VERSION = "default"
"""What SGLang calls the weights that it was started with."""


class Administered(Protocol):
    """What ``Administration`` asks for. All of it is called on the event loop that serves."""

    def abort(self, rid_prefix: str) -> None:
        """End the calls whose ``rid`` begins so, with what they have; the empty text means all."""

    async def pause(self, mode: PauseMode) -> None:
        """Generate nothing more; new calls wait. Returns when it is so."""

    async def resume(self) -> None:
        """Go on after a pause."""

    async def update_weights(self, body: WeightsBody) -> None:
        """Take other weights; ``InvalidInput`` where they do not fit, and nothing has changed then."""

    async def name_weights(self, version: str) -> None:
        """Call the weights something else from the next token on."""

    async def flush_cache(self) -> None:
        """Forget the prompts that were read."""


class Backend(Administered, Protocol):
    """An engine without its HTTP. All of it is called on the event loop that serves."""

    @property
    def name(self) -> str:
        """The model's name on the wire."""

    @property
    def context_length(self) -> int:
        """The most tokens of a prompt and its answer."""

    @property
    def vocabulary_size(self) -> int:
        """Token ids are below this."""

    @property
    def max_choices(self) -> int:
        """The most choices of one prompt."""

    @property
    def is_alive(self) -> bool:
        """Whether calls are being answered."""

    @property
    def tells_textless_logprobs(self) -> bool:
        """Whether streams give a chunk to the logprobs of tokens without a text, as SGLang's do if it has a parser."""

    @property
    def has_metrics(self) -> bool:
        """Whether replies tell how long a call stood and was worked on, as SGLang's do under ``--enable-metrics``."""

    @property
    def weight_version(self) -> str:
        """What the weights are called now."""

    def refuse_unserved(self, body: ChatBody | GenerateBody) -> None:
        """Raise ``InvalidInput`` where something is asked that SGLang serves and this engine does not."""

    async def encode(self, text: str) -> Sequence[int]:
        """The tokens of a text."""

    async def encode_chat(
        self, messages: Sequence[JSONObject], tools: Sequence[JSONObject], *, is_continued: bool
    ) -> Sequence[int]:
        """The tokens of a chat's prompt, its last message left open where that is continued; ``InvalidInput``."""

    async def decode(self, tokens: Sequence[int], *, with_marks: bool) -> str:
        """The text of tokens, with or without the marks of the chat template."""

    def token_text(self, token: int) -> str:
        """The text of one token."""

    def submit(self, call: PromptCall) -> None:
        """Begin a call; its pieces follow. Raises ``EngineUnavailable`` where none are answered any more."""

    def cancel(self, call: PromptCall) -> None:
        """End a call that nobody reads any more, or that has ended."""

    def model_info(self) -> JSONObject:
        """What ``/model_info`` tells of this engine: ``model_path`` at least."""

    def server_info(self) -> JSONObject:
        """What ``/server_info`` tells of it beside that."""

    def load(self) -> JSONObject:
        """What ``/v1/loads`` tells of it: ``num_running_reqs`` and ``num_waiting_reqs`` at least."""
