"""Compares a start with the recording it replays: what must agree, and what may differ with a warning. Pure."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.core.fields import read_flag
from forebay.core.records.recording_rows import RecordedRun
from forebay.core.run import RunSettings
from forebay.core.starts.run_start import OF_ONE_START
from forebay.replay.recording_secrets import cleaned

Payload = Mapping[str, Any]
Difference = dict[str, Any]
"""``field``, and its ``recorded`` value and its value ``now``, as JSON; null if the field was left out."""

LIMITS = ("max_tokens", "max_completion_tokens")
SAMPLING = "sampling_params"
GROUP_SIZE, ALIAS = "group_size", "num_repeat_per_sample"
ROWS = "input_file"
MUST_AGREE = (ROWS, GROUP_SIZE, "model", "template_path", "capture", SAMPLING)
"""What a start may list in ``ignore``. A single sampling parameter works, too: ``sampling_params.temperature``."""
ALIASES = {
    ALIAS: GROUP_SIZE,
    "input_sha256": ROWS,
    **{name: f"{SAMPLING}.{name}" for name in LIMITS},
}
NOT_INHERITED = OF_ONE_START | {"keep_bodies"}
"""Fields that no replay inherits."""
OF_A_PROCESS = frozenset({"oversampling", "scheduler", "workers", "backend", "arrays"})
"""Fields that have no meaning for a run without a process."""
NOT_NEEDED = OF_A_PROCESS | {"input_file", "remote_engine_url", "num_process"}
"""Fields that a run without a process does not inherit."""
NOT_ASKED = NOT_INHERITED | {
    *("run_key", "api_key", "num_epoch", "tokenizer_path", "remote_engine_url", "num_process", "queue_size"),
    *("shuffle_seed", "num_reward_workers", "max_attempts", "retry_budgets", "reward_timeout_s", *MUST_AGREE, *ALIASES),
}
"""Fields that do not change the rollout's requests, or that ``must_agree`` compares."""
MAX_VALUE_LENGTH = 200


def must_agree(
    recorded: RecordedRun, payload: Payload, *, input_sha256: str = "", ignore: Sequence[str] = ()
) -> list[Difference]:
    """Differences that forbid a start with this ``payload``, except the fields it ``ignore``s.

    ``input_sha256`` is the hash of the start's input file; "" if it has none or the hash is unknown, and then rows are
    not compared. Raises ``InvalidInput`` for a name in ``ignore`` that is not in ``MUST_AGREE``.
    """
    ignored = _ignored(ignore)
    found = [*_rows(recorded, payload, input_sha256), *_fields(recorded.payload, payload)]
    return [each for each in found if not {each["field"], each["field"].partition(".")[0]} & ignored]


def may_differ(recorded: RecordedRun, payload: Payload, *, input_sha256: str = "") -> list[Difference]:
    """Differences that only cause a warning: the task type, and fields that only the generator interprets.

    The input file is included if its path differs and the content of either file is unknown. Empty values, None and
    secrets are not compared.
    """
    old, new = cleaned(recorded.payload), cleaned(payload)
    pairs = [("task_type", recorded.task_type, new.get("task_type"))]
    if not (recorded.input_sha256 and input_sha256):
        pairs.append((ROWS, old.get(ROWS), new.get(ROWS)))
    found = [_difference(name, *values) for name, *values in pairs if _are_two(*values)]
    own = sorted((old.keys() | new.keys()) - NOT_ASKED - _settings() - {"task_type"})
    return found + [_difference(name, old.get(name), new.get(name)) for name in own if old.get(name) != new.get(name)]


def code_in_words(recorded: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Which files of a generator's code changed. The mappings have the SHA-256 of each file, by name."""
    if not recorded:
        return "the generator's code changed since the recording, which does not list its files"
    files = [
        f"{name} (removed)" if name not in now else name if name in recorded else f"{name} (new)"
        for name in sorted({name for name, _ in recorded.items() ^ now.items()})
    ]
    return f"the generator's code changed since the recording: {', '.join(files)}"[:2_000]


def is_as_recorded(name: str) -> bool:
    """Whether a field of a start is a setting of its groups, or part of its requests to the model."""
    return name in _settings() or name in MUST_AGREE[1:] or name in ALIASES


def in_words(differences: Sequence[Difference]) -> list[str]:
    """A line for each difference, for the user who started the run."""
    return [f"{each['field']} was {each['recorded']!r} in the recording, now {each['now']!r}" for each in differences]


def _ignored(ignore: Sequence[str]) -> set[str]:
    names = {ALIASES.get(name, name) for name in ignore}
    for name in sorted(names):
        head, dot, parameter = name.partition(".")
        if head not in MUST_AGREE or (dot and (head != SAMPLING or not parameter)):
            nearest = difflib.get_close_matches(name, MUST_AGREE, 1)
            known = f"known names: {', '.join(MUST_AGREE)}; or a single parameter, such as {SAMPLING}.temperature"
            meant = f"; did you mean {nearest[0]}?" if nearest else ""
            raise InvalidInput(f"replay.ignore cannot list {name!r:.100}{meant}", hint=known, field="replay.ignore")
    return names


def _rows(recorded: RecordedRun, payload: Payload, input_sha256: str) -> Iterator[Difference]:
    if _are_two(recorded.input_sha256, input_sha256):
        old, new = recorded.payload.get(ROWS), payload.get(ROWS)
        yield _difference(ROWS, _content(old, recorded.input_sha256), _content(new, input_sha256))


def _content(path: object, sha256: str) -> str:
    return f"{path} (sha256 {sha256[:16]})"


def _fields(old: Payload, new: Payload) -> Iterator[Difference]:
    sizes = _group_size(old), _group_size(new)
    if sizes[0] != sizes[1]:
        yield _difference(GROUP_SIZE, *sizes)
    for name in ("model", "template_path"):
        if (old.get(name) or None) != (new.get(name) or None):
            yield _difference(name, old.get(name), new.get(name))
    # The default depends on the generator.
    captures = [each["capture"] for each in (old, new) if each.get("capture") is not None]
    if len({read_flag("capture", each) for each in captures}) > 1:
        yield _difference("capture", *captures)
    was, now = _sampling(old), _sampling(new)
    for name in sorted(was.keys() | now.keys()):
        if was.get(name) != now.get(name):
            yield _difference(f"{SAMPLING}.{name}", was.get(name), now.get(name))


def _group_size(payload: Payload) -> Any:
    return next((_number(payload[name]) for name in (ALIAS, GROUP_SIZE) if payload.get(name) is not None), None)


def _sampling(payload: Payload) -> dict[str, Any]:
    """The effective sampling parameters. A top-level ``max_tokens`` applies if they have no limit of their own."""
    given = payload.get(SAMPLING)
    own = given if isinstance(given, Mapping) else {}
    params = {name: _number(each) for name, each in own.items() if each is not None}
    beside = payload.get("max_tokens")
    if beside is not None and not params.keys() & set(LIMITS):
        params["max_tokens"] = _number(beside)
    return params


def _number(value: Any) -> Any:
    """Slime's client sends numbers as strings."""
    for read in (int, float) if isinstance(value, str) else ():
        with suppress(ValueError):
            return read(value)
    return value


def _are_two(recorded: object, now: object) -> bool:
    """Whether both values are known and differ."""
    return recorded not in ("", None) and now not in ("", None) and recorded != now


def _settings() -> set[str]:
    return set(RunSettings.model_fields) | {field.alias or "" for field in RunSettings.model_fields.values()}


def _difference(name: str, recorded: object, now: object) -> Difference:
    return {"field": name, "recorded": _short(recorded), "now": _short(now)}


def _short(value: object) -> object:
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= MAX_VALUE_LENGTH else f"{text[:MAX_VALUE_LENGTH]}…"
