"""The built-in roles: dump and load a whole rollout step, or one sample of a stream."""

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.replay.skip.base import ARGUMENTS, BaseSkip, NoDump, register_skip
from forebay.replay.skip.config import RolloutSkipConfig, SkipAction, SkipConfig, read, size_at, text_at
from forebay.replay.skip.dumps import DumpFolder, DumpUnusable
from forebay.replay.skip.values import pack, parts
from forebay.replay.substitutes import substitute

logger = logging.getLogger(__name__)

SAMPLE_ID = re.compile(r"(?:uid_)?sample_[0-9]+_([0-9]+)")


def experiment_folder(dump_dir: Path, config: object) -> Path:
    """The folder for dumps of this configuration. Other sizes use another folder."""
    experiment = text_at(config, "trainer.experiment_name", "default_experiment_name")
    project = text_at(config, "trainer.project_name", "default_project_name")
    sizes = "GBS{}_N{}_in{}_out{}".format(
        size_at(config, "data.gen_batch_size", "data.train_batch_size"),
        size_at(config, "actor_rollout_ref.rollout.n"),
        size_at(config, "data.max_prompt_length"),
        size_at(config, "data.max_response_length"),
    )
    # A slash in a name must not lead to another folder.
    return dump_dir / re.sub(r"[/\0]", "_", f"{experiment}_{project}") / sizes


@register_skip("rollout")
class RolloutSkip(BaseSkip):
    """Skips a call that generates the whole batch of a step, as set by ``SkipManager.set_step``."""

    config_class = RolloutSkipConfig

    def __init__(self, local_config: SkipConfig, global_config: Any) -> None:
        super().__init__(local_config, global_config)
        self.dumps = DumpFolder(experiment_folder(self.dump_dir, global_config))
        self.on_mismatch = getattr(local_config, "on_mismatch", "warn")
        self._has_failed = False
        """Whether the last dump failed. Calls then do not wait for a dump."""
        self._logged: set[object] = set()

    def meet_precondition(self, step: int, /, *_args: Any, **_kwargs: Any) -> bool:
        return self.has_dump(step)

    def has_dump(self, step: int) -> bool:
        """Whether any dump can replace ``step``."""
        return next(self._candidates(step), None) is not None

    def _candidates(self, step: int) -> Iterator[int]:
        """The steps whose dumps may be loaded for ``step``, best first. Not cached: other processes write, too."""
        available = {step} if self.action == SkipAction.CACHE else {step, *self._folders()}
        while (given := substitute(step, available)) is not None:
            if self._of_dump(given, self.dumps.meta) is not None:
                yield given
            available.discard(given)

    def _folders(self) -> list[int]:
        try:
            return self.dumps.steps()
        except OSError as error:
            self._log_once(str(error), "%s cannot be read: %s", self.dumps.path, error)
            return []

    def _of_dump(self, step: int, look: Callable[[int], Any]) -> Any:
        """The result of ``look``; None if the dump is unusable, which is logged once."""
        try:
            return look(step)
        except DumpUnusable as unusable:
            self._log_once((step, str(unusable)), "%s is not used: %s", self.dumps.path / str(step), unusable)
        except OSError as error:
            self._log_once((step, str(error)), "%s cannot be read: %s", self.dumps.path / str(step), error)
        return None

    def warp_function(self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        for given in self._candidates(step):
            if (dump := self._of_dump(given, self.dumps.load)) is None:
                continue
            self._compare(step, dump.meta.arguments, func, args, kwargs)
            self._log_notes(given, dump.meta.notes)
            logger.info("step %d: skipped, with the dump of step %d in %s", step, given, self.dumps.path)
            return dump.value
        raise NoDump(f"{self.action} action expected dumped data: no dump for step {step} in {self.dumps.path}")

    def _compare(self, step: int, dumped: Mapping[str, str], func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Raise ``NoDump`` or ``InvalidInput`` if the arguments differ and ``on_mismatch`` is not ``warn``."""
        now = {} if self.action == SkipAction.REPEAT else self.digest_arguments(func, args, kwargs)
        differing = ", ".join(sorted(name for name in now.keys() & dumped.keys() if now[name] != dumped[name]))
        if not differing:
            return
        found = f"step {step}: the dump was made with different arguments than this call has: {differing}"
        if self.on_mismatch == "raise":
            raise InvalidInput(found, hint=f"remove {self.dumps.path / str(step)}, or set on_mismatch to run")
        self._log_once(("arguments", step), "%s (on_mismatch: %s)", found, self.on_mismatch)
        if self.on_mismatch == "run":
            raise NoDump(found)

    def prepare_data(self, step: int, result: Any, /, *_args: Any, **_kwargs: Any) -> None:
        try:
            notes = self.dumps.write(step, result, ARGUMENTS.get() or {})
        except Exception as error:  # noqa: BLE001 - from the disk, the value or a codec: none may stop the training
            self._has_failed = True
            self._log_once("failed", "step %d is not dumped: %s; training continues", step, _as_text(error))
        else:
            self._has_failed = False
            self._logged.discard("failed")
            self._log_notes(step, notes)

    def _log_notes(self, step: int, notes: Sequence[str]) -> None:
        if words := "; ".join(notes):
            self._log_once(words, "the dump of step %d differs from the function's result: %s", step, words)

    def lock_path(self, step: int) -> Path | None:
        if self._has_failed:
            return None
        # Under `repeat`, waiting calls use the first dump written, whatever its step.
        return self.dumps.path / (f".{step}.lock" if self.action == SkipAction.CACHE else ".repeat.lock")

    def digest_arguments(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Mapping[str, str]:
        digests: dict[str, str] = {}
        for name, value in _bound(func, args, kwargs).items():
            try:
                digests |= {part: pack(of_part, part).digest() for part, of_part in parts(value, name)}
            except Exception as error:  # noqa: BLE001 - often the trainer itself, which cannot be digested
                logger.debug("the argument %s has no digest: %s", name, error)
        return digests

    def _log_once(self, what: object, message: str, *values: object) -> None:
        if what not in self._logged:
            self._logged.add(what)
            logger.warning(message, *values)


def _bound(func: Callable[..., Any], args: Any, kwargs: Any) -> Mapping[str, Any]:
    """The arguments of a call by name."""
    try:
        return inspect.signature(func).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # wrong arguments, which the function will report; or no known signature
        return {**{f"argument {number}": value for number, value in enumerate(args)}, **kwargs}


def _as_text(error: Exception) -> str:
    hint = getattr(error, "hint", "")
    return f"{error} ({hint})" if hint else str(error) or type(error).__name__


def parse_async_rollout_sample_step(sample_id: object) -> int:
    """The position of a sample in the order of feeding: 7 for ``sample_0_7`` and ``uid_sample_0_7``.

    This is neither the trainer's step nor the order of completion. Raises ``InvalidInput``, which is a
    ``ValueError``.
    """
    if not isinstance(sample_id, str) or not (found := SAMPLE_ID.fullmatch(sample_id)):
        raise InvalidInput(
            f"Invalid async rollout sample_id {sample_id!r}: not sample_<epoch>_<index>", field="sample_id"
        )
    return int(found[1])


@register_skip("async_rollout")
class AsyncRolloutSkip(RolloutSkip):
    """Skips a call that generates one sample of a stream. The step is the index in the sample's id."""

    support_online_step = True

    def extract_step(self, /, *args: Any, **kwargs: Any) -> int:
        """The step in ``sample_id`` (third argument or keyword), or else in the ``uid`` of the prompts."""
        if "sample_id" in kwargs:
            return parse_async_rollout_sample_step(kwargs["sample_id"])
        if len(args) > 2 and isinstance(args[2], str):
            return parse_async_rollout_sample_step(args[2])
        # For a method, the first argument is its object.
        for prompts in (kwargs.get("prompts"), *args[1:], *args[:1]):
            if isinstance(prompts, str) and SAMPLE_ID.fullmatch(prompts):
                return parse_async_rollout_sample_step(prompts)
            if (uid := _uid(prompts)) is not None:
                return parse_async_rollout_sample_step(uid)
        raise InvalidInput("neither sample_id nor a uid in prompts identifies the sample", field="sample_id")


def _uid(prompts: object) -> object:
    """The first ``uid`` of prompts as a Python string, whatever array holds it."""
    uids = read(prompts, "non_tensor_batch.uid")
    if uids is None:
        uids = read(prompts, "uid")
    if isinstance(uids, str) or uids is None:
        return uids
    try:
        return str(uids[0])
    except (TypeError, IndexError, KeyError):
        return None
