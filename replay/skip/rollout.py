"""The roles that are built in: a whole rollout step, and one sample of a stream, dumped and loaded."""

import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.replay.skip.base import ARGUMENTS, BaseSkip, NoDump, register_skip
from forebay.replay.skip.config import RolloutSkipConfig, SkipAction, SkipConfig, read, size_at, text_at
from forebay.replay.skip.dumps import Dump, DumpFolder, DumpMeta, DumpUnusable
from forebay.replay.skip.step_locks import StepLock
from forebay.replay.skip.values import pack
from forebay.replay.substitutes import substitute

logger = logging.getLogger(__name__)

SAMPLE_ID = re.compile(r"(?:uid_)?sample_[0-9]+_([0-9]+)")


def experiment_folder(dump_dir: Path, config: object) -> Path:
    """Where the dumps of a trainer with this configuration are: what has other sizes is never seen."""
    experiment = text_at(config, "trainer.experiment_name", "default_experiment_name")
    project = text_at(config, "trainer.project_name", "default_project_name")
    sizes = "GBS{}_N{}_in{}_out{}".format(
        size_at(config, "data.gen_batch_size", "data.train_batch_size"),
        size_at(config, "actor_rollout_ref.rollout.n"),
        size_at(config, "data.max_prompt_length"),
        size_at(config, "data.max_response_length"),
    )
    # One folder, whatever the names are: a slash in them must not lead elsewhere.
    return dump_dir / re.sub(r"[/\0]", "_", f"{experiment}_{project}") / sizes


@register_skip("rollout")
class RolloutSkip(BaseSkip):
    """A call that generates the whole batch of a step, by the step of ``SkipManager.set_step``."""

    config_class = RolloutSkipConfig

    def __init__(self, local_config: SkipConfig, global_config: Any) -> None:
        super().__init__(local_config, global_config)
        self.dumps = DumpFolder(experiment_folder(self.dump_dir, global_config))
        self._has_failed = False
        """Whether the last dump failed: nobody waits then for one that will not come."""
        self._logged: set[object] = set()

    # Of these arguments, none makes a dump another one.
    def meet_precondition(self, step: int, /, *_args: Any, **_kwargs: Any) -> bool:
        return self.has_dump(step)

    def has_dump(self, step: int) -> bool:
        """Whether there is one that can take the place of ``step``."""
        return self._given(step, set()) is not None

    def _given(self, step: int, refused: set[int]) -> int | None:
        """The step whose dump is loaded for ``step``. Looked up anew each time: others write, too."""
        available = {step} if self.action == SkipAction.CACHE else {step, *self._dumped_steps()}
        while (given := substitute(step, available - refused)) is not None:
            if self._is_dump(given):
                return given
            refused.add(given)
        return None

    def _dumped_steps(self) -> list[int]:
        try:
            return self.dumps.steps()
        except OSError as error:
            self._log_once(str(error), "%s cannot be read: %s", self.dumps.path, error)
            return []

    def _is_dump(self, step: int) -> bool:
        try:
            return self.dumps.meta(step) is not None
        except DumpUnusable as unusable:
            self._log_once((step, str(unusable)), "%s is not used: %s", self.dumps.path / str(step), unusable)
        except OSError as error:
            self._log_once((step, str(error)), "%s cannot be read: %s", self.dumps.path / str(step), error)
        return False

    def warp_function(self, step: int, func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        refused: set[int] = set()
        while (given := self._given(step, refused)) is not None:
            if (dump := self._loaded(given)) is not None:
                self._log_use(step, given, dump.meta, func, args, kwargs)
                return dump.value
            refused.add(given)
        raise NoDump(f"there is no dump for step {step} in {self.dumps.path}")

    def _loaded(self, step: int) -> Dump | None:
        try:
            return self.dumps.load(step)
        except DumpUnusable as unusable:
            self._log_once((step, str(unusable)), "%s is not used: %s", self.dumps.path / str(step), unusable)
            self._put_aside(step)
        except OSError as error:
            self._log_once((step, str(error)), "%s cannot be read: %s", self.dumps.path / str(step), error)
        return None

    def _put_aside(self, step: int) -> None:
        """Unless somebody has the lock: they will see for themselves what lies there."""
        lock = StepLock(self.dumps.lock_path(step))
        try:
            if lock.try_acquire():
                self.dumps.put_aside_if_unusable(step)
        except OSError as error:
            self._log_once(("aside", step), "%s cannot be put aside: %s", self.dumps.path / str(step), error)
        finally:
            lock.release()

    def _log_use(self, step: int, given: int, meta: DumpMeta, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        logger.info("step %d: skipped, with the dump of step %d in %s", step, given, self.dumps.path)
        if given != step:
            return  # of another step, the arguments are meant to be others
        now = self.digest_arguments(func, args, kwargs)
        differing = sorted(name for name in now.keys() & meta.arguments.keys() if now[name] != meta.arguments[name])
        if differing:
            self._log_once(
                ("arguments", step),
                "step %d: the dump was made with another %s than the call has now; what is loaded may not match it",
                step,
                ", ".join(differing),
            )

    def prepare_data(self, step: int, result: Any, /, *_args: Any, **_kwargs: Any) -> None:
        try:
            self.dumps.write(step, result, ARGUMENTS.get() or {})
        except Exception as error:  # noqa: BLE001 - of the disk, the value, a codec: none of it is worth a training
            self._has_failed = True
            self._log_once("failed", "step %d is not dumped: %s; training goes on", step, _in_words(error))
        else:
            self._has_failed = False
            self._logged.discard("failed")

    def locks(self, step: int) -> Sequence[Path]:
        if self._has_failed:
            return ()
        of_step = self.dumps.lock_path(step)
        # Whoever waits under `repeat` takes what the first one makes, of whatever step that is.
        return (of_step,) if self.action == SkipAction.CACHE else (self.dumps.path / ".repeat.lock", of_step)

    def digest_arguments(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Mapping[str, str]:
        digests = {}
        for name, value in _bound(func, args, kwargs).items():
            try:
                digests[name] = pack(value, name).digest()
            except Exception as error:  # noqa: BLE001 - the trainer itself, mostly; whatever it is, it has no digest
                logger.debug("the argument %s has no digest: %s", name, error)
        return digests

    def _log_once(self, what: object, message: str, *values: object) -> None:
        if what not in self._logged:
            self._logged.add(what)
            logger.warning(message, *values)


def _bound(func: Callable[..., Any], args: Any, kwargs: Any) -> Mapping[str, Any]:
    """The arguments of a call by their names."""
    try:
        return inspect.signature(func).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # they do not fit, which the function itself will say; or it tells no signature
        return {**{f"argument {number}": value for number, value in enumerate(args)}, **kwargs}


def _in_words(error: Exception) -> str:
    hint = getattr(error, "hint", "")
    return f"{error} ({hint})" if hint else str(error) or type(error).__name__


def parse_async_rollout_sample_step(sample_id: object) -> int:
    """The place of a sample in the order in which samples are fed: 7 of ``sample_0_7`` and of ``uid_sample_0_7``.

    It is neither the trainer's step nor the order in which samples are finished. Raises ``InvalidInput``, which is a
    ``ValueError``.
    """
    if not isinstance(sample_id, str) or not (found := SAMPLE_ID.fullmatch(sample_id)):
        raise InvalidInput(f"{sample_id!r} is no id of a sample: sample_<epoch>_<index>", field="sample_id")
    return int(found[1])


@register_skip("async_rollout")
class AsyncRolloutSkip(RolloutSkip):
    """A call that generates one sample of a stream, by the step that its own id tells."""

    support_online_step = True

    def extract_step(self, /, *args: Any, **kwargs: Any) -> int:
        """By ``sample_id``, the third argument or by its name, else by ``uid`` of the prompts."""
        if "sample_id" in kwargs:
            return parse_async_rollout_sample_step(kwargs["sample_id"])
        if len(args) > 2 and isinstance(args[2], str):
            return parse_async_rollout_sample_step(args[2])
        # The first one of a method is its object.
        for prompts in (kwargs.get("prompts"), *args[1:], *args[:1]):
            if isinstance(prompts, str) and SAMPLE_ID.fullmatch(prompts):
                return parse_async_rollout_sample_step(prompts)
            if (uid := _uid(prompts)) is not None:
                return parse_async_rollout_sample_step(uid)
        raise InvalidInput("neither sample_id nor a uid in prompts tells which sample this is", field="sample_id")


def _uid(prompts: object) -> object:
    """The first ``uid`` of prompts; as a text of Python's, whatever array it comes in."""
    uids = read(prompts, "non_tensor_batch.uid")
    if uids is None:
        uids = read(prompts, "uid")
    if isinstance(uids, str) or uids is None:
        return uids
    try:
        return str(uids[0])
    except (TypeError, IndexError, KeyError):
        return None
