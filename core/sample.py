"""Samples on the wire, JSON or binary: reads the few fields needed on arrival. The rest passes unchanged."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec

from forebay.core.binary_sample import Field, check_arrays, is_binary, unpack, value_of
from forebay.core.errors import InvalidInput
from forebay.core.ids import MAX_ID_LENGTH, GivenId, InstanceId, read_instance_id, read_uid
from forebay.core.outcome import REWARDED, RolloutOutcome, finite_number, read_reward_parts
from forebay.core.parts import NO_ARRAYS, SideArrays, read_fields
from forebay.core.records.reward_place import Span, find_field
from forebay.core.weight_versions import oldest_version

MAX_FIELD_BYTES = 16 << 20
"""Maximum size of each field read on arrival except ``messages``: parsed, it takes up to thirty times as much."""
LONGEST_NUMBER = 4_300
"""Digits of the longest integer that Python's ``json`` reads."""
MAX_SLOT = 65_535
MAX_EPOCH = 1 << 40
MAX_FORK = 65_535
OWN_NAMES = frozenset({"rollout_id", "outcome", "fork", "epoch", "slot"})
"""Field names that other writers on slime's routes may use for their own purposes."""
WRITER_HEADER = "X-Forebay-Writer"
"""Header of writers on these routes that use ``OWN_NAMES`` in Forebay's sense; its value is ignored."""

PLACE_HEADER = "X-Forebay-Place"
"""Header of a write on these routes that asks for the sample's group, epoch and slot; its value is ignored."""

Identifier = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_ID_LENGTH)]
Epoch = Annotated[int, msgspec.Meta(ge=0, le=MAX_EPOCH)]
Slot = Annotated[int, msgspec.Meta(ge=0, le=MAX_SLOT)]


class _Head(msgspec.Struct):
    """Fields that are read from every body on arrival. The rest passes unchanged."""

    uid: Identifier | int | float
    instance_id: Identifier | int | float
    messages: msgspec.Raw
    reward: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    raw_reward: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    status: Any = None
    error: Any = None
    weight_version: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    weight_versions: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    retokenized: Any = None
    asked_models: Any = None


class ForeignHead(_Head):
    """Fields read from another writer's body, where the names below may mean something else."""

    epoch: ClassVar[int | None] = None
    slot: ClassVar[int | None] = None
    rollout_id: ClassVar[object] = None
    fork: ClassVar[object] = None
    outcome: ClassVar[object] = None
    parts: ClassVar[Field] = msgspec.UNSET
    arrays: ClassVar[Field] = msgspec.UNSET
    reward_parts: ClassVar[Field] = msgspec.UNSET


class SampleHead(_Head):
    """Fields read from all other bodies."""

    epoch: Epoch | None = None
    slot: Slot | None = None
    rollout_id: Any = None
    fork: Any = None
    outcome: Any = None
    parts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    arrays: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    reward_parts: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


Head = ForeignHead | SampleHead


class Incoming(msgspec.Struct, gc=False):
    """A checked sample. ``reward`` is None if it failed; then ``error`` says why."""

    uid: str
    instance_id: InstanceId
    reward: float | None
    epoch: int | None
    slot: int | None
    error: str
    body: bytes
    reward_span: Span | None
    """Where the reward is in ``body``; None also if its ``raw_reward`` must be replaced too."""
    rollout_id: str = ""
    """Samples of a group that share it are forks of one rollout; "" if it has none."""
    oldest_version: int | None = None
    """The oldest weight version that the sample names."""
    fork: int = 0
    """Number of the fork within its slot's rollout, from 1; 0 for the main sample, which alone fills the slot."""
    outcome: RolloutOutcome = RolloutOutcome.OK
    is_foreign: bool = False
    """Whether its ``rollout_id``, ``outcome``, ``fork``, ``epoch`` and ``slot`` have their writer's own meaning."""
    is_retokenized: bool = False
    """Whether its engine returned no token ids."""
    asked_models: list[Any] = []
    """Models that its rollout requested, if they need a check."""
    num_tokens: int = 0
    """Number of tokens of a binary sample; 0 for JSON."""
    side: SideArrays = NO_ARRAYS
    """The parts that it names, and its rows in them."""
    parts: Mapping[str, bytes | memoryview] = {}
    """These parts by digest, to be stored with it."""
    reward_parts: dict[str, float] | None = None
    """Named parts of the reward; None without a reward or parts."""


_decode_head = msgspec.json.Decoder(SampleHead).decode
_decode_large_head = msgspec.json.Decoder(
    msgspec.defstruct("_LargeHead", [(name, msgspec.Raw, msgspec.UNSET) for name in SampleHead.__struct_fields__])
).decode
_decode_foreign_head = msgspec.json.Decoder(ForeignHead).decode


def read_sample(body: bytes, *, is_lenient: bool, is_foreign: bool = False) -> Incoming:
    """Check a body and return its indexed fields.

    ``is_lenient`` is slime's behaviour: a sample without a usable reward counts as failed, an invalid ``outcome``,
    ``fork`` or ``reward_parts`` is ignored, and parts and arrays are not read. Otherwise they are rejected. In a
    foreign writer's body none of these fields are read. Raises ``InvalidInput`` that names the field.
    """
    head = _parse(body, is_foreign=is_foreign)
    uid, instance_id = _uid(head.uid), read_instance_id(head.instance_id)
    outcome, reward, error = _ending(head, is_lenient=is_lenient)
    if "\0" in uid or (isinstance(instance_id, str) and "\0" in instance_id):
        name = "uid" if "\0" in uid else "instance_id"
        raise InvalidInput(f"{name} contains a NUL byte, which databases and files do not accept", field=name)
    span = None
    # If the body has a ``raw_reward``, that must be replaced too, so one span is not enough.
    if reward is not None and isinstance(head.reward, msgspec.Raw) and head.raw_reward is msgspec.UNSET:
        span = find_field(body, head.reward)
    return Incoming(
        uid,
        instance_id,
        reward,
        head.epoch,
        head.slot,
        error,
        body,
        span,
        rollout_id(head.rollout_id),
        _oldest_version(head),
        0 if head.fork is None else _fork(head, is_lenient=is_lenient),
        outcome,
        is_foreign,
        head.retokenized is True,
        head.asked_models if isinstance(head.asked_models, list) else [],
        side=NO_ARRAYS if is_lenient else read_fields(head.parts, head.arrays),
        reward_parts=None if reward is None else _reward_parts(head.reward_parts, is_lenient=is_lenient),
    )


def _parse(body: bytes, *, is_foreign: bool) -> Head:
    try:
        # The decoder skips strings that it need not read, so it would accept bytes that are not UTF-8.
        # Most bodies are ASCII, which is checked many times faster than decoding.
        if not body.isascii():
            body.decode()
        if len(body) > MAX_FIELD_BYTES:
            _check_fields(body, ForeignHead if is_foreign else SampleHead)
        head: Head = _decode_foreign_head(body) if is_foreign else _decode_head(body)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInput(f"the body is not JSON: {error}", field="body") from None
    if memoryview(head.messages)[0] != ord("["):
        raise InvalidInput("messages: must be a list", field="messages", hint=_FIELD_HINTS["messages"])
    # Python's ``json`` could not read a batch with such a number.
    if len(body) > LONGEST_NUMBER and _may_hold_long_number(body):
        _check_numbers(body)
    return head


def _check_fields(body: bytes, head: type[Head]) -> None:
    fields = _decode_large_head(body)
    for name in set(head.__struct_fields__) - {"messages"}:
        raw = getattr(fields, name)
        if isinstance(raw, msgspec.Raw) and memoryview(raw).nbytes > MAX_FIELD_BYTES:
            raise InvalidInput(f"{name}: is longer than {MAX_FIELD_BYTES:,} bytes", field=name)


def _may_hold_long_number(body: bytes) -> bool:
    # A number that is too long covers one of these places, so only a few bytes must be checked.
    half = LONGEST_NUMBER // 2 - 1
    places = [at for at in range(0, len(body), LONGEST_NUMBER) if body[at : at + 1].isdigit()]
    return any(body[at : at + half].isdigit() or body[max(0, at - half) : at].isdigit() for at in places)


def _check_numbers(body: bytes) -> None:
    try:
        json.loads(body)
    except ValueError as error:
        raise InvalidInput(f"the body contains a number that is too long: {error}", field="body") from None


def _wrong_field(complaint: str) -> InvalidInput:
    """Convert the decoder's error: what is wrong, and in which field."""
    # Format: ``Expected `str`, got `int` - at `$.uid` ``.
    message, _, path = complaint.partition(" - at `$.")
    missing = _missing_field(message)
    name = missing[1] if missing else path.rstrip("`").partition("[")[0] or "body"
    if missing:
        message = "is missing"
    hint = _FIELD_HINTS.get(name, "send one JSON object for each sample" if name == "body" else "")
    return InvalidInput(f"{name}: {message}", field=name, hint=hint)


def _uid(given: GivenId) -> str:
    try:
        return given if isinstance(given, str) else read_uid(given)
    except ValueError as error:
        raise InvalidInput(f"uid: {error}", field="uid", hint=_FIELD_HINTS["uid"]) from None


_missing_field = re.compile(r"Object missing required field `(\w+)`").match
_FIELD_HINTS = {
    "uid": f"a string of 1 to {MAX_ID_LENGTH} characters, or a number, different for each sample of a run",
    "instance_id": f"a string of 1 to {MAX_ID_LENGTH} characters, or a number",
    "messages": "a list of chat messages; it may be empty",
    "epoch": f"an integer from 0 to {MAX_EPOCH}, or leave it out",
    "slot": f"an integer from 0 to {MAX_SLOT}, or leave it out",
}


def _ending(head: Head, *, is_lenient: bool) -> tuple[RolloutOutcome, float | None, str]:
    """How the rollout ended, its reward if that counts, and otherwise the error."""
    outcome = None if head.outcome is None else _outcome(head, is_lenient=is_lenient)
    reward = _finite_number(head.reward)
    # A failed sample of Forebay's writers never has a reward, even if its body does. For other writers it counts.
    is_failed = head.status == "failed" and (reward is None or not isinstance(head, ForeignHead))
    if is_failed or (outcome is not None and outcome not in REWARDED):
        return outcome or RolloutOutcome.AGENT_FAILURE, None, _error_text(head.error)
    if reward is not None:
        return outcome or RolloutOutcome.OK, reward, ""
    if not is_lenient:
        raise InvalidInput("reward must be a finite number", field="reward", hint=_FAILED_HINT)
    return RolloutOutcome.JUDGE_FAILURE, None, "invalid_reward"


_FAILED_HINT = 'a rollout that failed is sent with "status": "failed" and an "error", and without a reward'
_OUTCOMES: dict[object, RolloutOutcome] = {outcome.value: outcome for outcome in RolloutOutcome}


def _outcome(head: Head, *, is_lenient: bool) -> RolloutOutcome | None:
    outcome = _OUTCOMES.get(head.outcome) if isinstance(head.outcome, str) else None
    is_failed = head.status == "failed"
    if is_lenient:
        return None if is_failed and outcome in REWARDED else outcome
    if outcome is None:
        raise InvalidInput(f"outcome must be one of {', '.join(RolloutOutcome)}, or left out", field="outcome")
    if is_failed == (outcome in REWARDED):
        ending = "failed" if is_failed else "not failed"
        raise InvalidInput(f"outcome {outcome!s} of a sample that has {ending}", field="outcome", hint=_FAILED_HINT)
    return outcome


def _fork(head: Head, *, is_lenient: bool) -> int:
    fork = fork_number(head.fork)
    # Without these fields the fork could not be matched to its main sample.
    if fork and (head.epoch is None or head.slot is None or not rollout_id(head.rollout_id)):
        fork = None
    if fork is None and not is_lenient:
        raise InvalidInput(
            f"fork must be an integer from 0 to {MAX_FORK}, together with epoch, slot and rollout_id",
            field="fork",
            hint="a fork has the same ones as its rollout's main sample, and is sent before it",
        )
    return fork or 0


def fork_number(value: object) -> int | None:
    """Return a sample's ``fork`` if it is valid (0 for a main sample), otherwise None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_FORK else None


def _finite_number(raw: msgspec.Raw | msgspec.UnsetType) -> float | None:
    if not isinstance(raw, msgspec.Raw):
        return None
    try:
        return finite_number(msgspec.json.decode(raw))  # true and false are 1 and 0
    except msgspec.ValidationError:  # beyond float64
        return None


def _reward_parts(raw: Field, *, is_lenient: bool) -> dict[str, float] | None:
    if not isinstance(raw, msgspec.Raw) or bytes(raw) == b"null":
        return None
    try:
        return read_reward_parts(value_of(raw)) or None
    except InvalidInput:
        if is_lenient:
            return None
        raise


def rollout_id(value: object) -> str:
    """Normalise a ``rollout_id`` for comparison: "" unless it is a string or an integer."""
    if value is None or isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    return str(value)[:MAX_ID_LENGTH]


def _oldest_version(head: Head) -> int | None:
    if head.weight_version is msgspec.UNSET and head.weight_versions is msgspec.UNSET:
        return None
    return oldest_version(value_of(head.weight_version), value_of(head.weight_versions))


def _error_text(error: object) -> str:
    if isinstance(error, dict):
        return ": ".join(str(error[key]) for key in ("type", "message") if error.get(key))[:2_000] or "failed"
    return str(error)[:2_000] if error else "failed"


def named_versions(body: bytes) -> set[int]:
    """The weight versions that a stored sample names; text, which has no order, is left out."""
    head = _decode_foreign_head(unpack(body).json if is_binary(body) else body)
    listed = value_of(head.weight_versions)
    named = [value_of(head.weight_version), *(listed if isinstance(listed, list) else ())]
    return {version for version in named if type(version) is int}


def read_any_sample(body: bytes) -> Incoming:
    """Check a binary or JSON body and return its indexed fields. Raises ``InvalidInput`` that names the field."""
    return _read_binary(body) if is_binary(body) else read_sample(body, is_lenient=False)


def _read_binary(body: bytes) -> Incoming:
    pieces = unpack(body)
    if not bytes(pieces.json[:1]) == b"{":
        raise InvalidInput("a JSON object must follow the arrays of a binary sample", field="body")
    sample = read_sample(bytes(pieces.json), is_lenient=False)
    check_arrays(pieces)
    sample.num_tokens = len(pieces.tokens) // 4
    shift = len(body) - len(pieces.json)
    # Found in the JSON part; in the stored body the arrays come before it.
    span = sample.reward_span
    sample.body, sample.reward_span = body, span and (span[0] + shift, span[1] + shift)
    return sample


def is_policys(sampling: object, temperature: float = 1.0) -> bool:
    """Whether tokens sampled this way have the policy's logprobs at ``temperature``, and were drawn from them.

    ``sampling`` lists the parameters that are not neutral; None means unknown.
    """
    if not isinstance(sampling, dict) or sampling.keys() - {"temperature", "logprobs"}:
        return False
    # Raw logprobs are those of temperature 1, whatever the temperature of the tokens.
    is_after = "logprobs" not in sampling or (sampling["logprobs"] == "raw" and temperature == 1.0)
    return bool(is_after and sampling.get("temperature", 1.0) == temperature)
