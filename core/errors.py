"""Every error that Forebay raises.

ForebayError
├── InvalidInput (ValueError)            422  a body, a parameter or a setting is wrong
├── Unauthorized (PermissionError)       401  missing or wrong token or run key
├── HostNotAllowed (PermissionError)     421  the request's Host is not an accepted name
├── ForeignOrigin (PermissionError)      403  a browser sent the request from another site's page
├── NotFound (LookupError)               404
│   ├── RunNotFound
│   ├── GroupNotFound
│   ├── BatchNotFound
│   ├── CheckpointNotFound
│   └── PartNotFound (parts)
├── StartRefused (ValueError)            400  a run cannot start
│   ├── UnknownTaskType
│   ├── GeneratorBroken
│   └── InputRefused
├── Conflict                             409  the request conflicts with the current state
│   ├── BatchAcked
│   ├── LeaseLost
│   ├── CheckpointConflict
│   ├── BodiesGone
│   ├── PartsGone (parts)
│   ├── EnginesPaused
│   ├── PauseExpired
│   └── WeightUpdateFailed
├── RunEnded                             410  the run has ended and has nothing left to deliver
├── NoRun                                410  no run was started under this name
├── RequestStalled (web)                 408  the client stopped sending in the middle of its request
├── BodyTooLarge (ValueError)            413
├── HeadTooLarge (web)                   431
├── BufferFull                           429  wait and retry
├── StorageFailed (OSError)              507  the disk refused a write; nothing was acknowledged
│   ├── EntryTooLarge                    413  one item is larger than the journal accepts
│   └── BodyUnreadable                        a sample's stored body is missing or damaged
├── EngineError                          502  an engine answered with an error
│   └── EngineUnavailable (ConnectionError)  503  unreachable, or 502/503: the rollout waits and has not failed
├── NotRecorded, ReplayDiffers, RecordingDamaged (replay)  404, 409, 507: the recording lacks it, differs, is damaged
├── NotStorable, NoDump (replay)         422  the dump cannot hold this value; 404: there is no dump to load
├── WorkerError (workers)                500  a worker group could not do what was requested
├── HookFailed                           500  a user's hook raised, hung, died or returned an invalid result
└── MissingExtra (ImportError)           501  an optional dependency is not installed
"""

from collections.abc import Sequence
from typing import ClassVar


class ForebayError(Exception):
    """Base class. ``code`` is stable, ``status`` is the HTTP status, ``hint`` is the remedy."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500

    def __init__(self, message: str, *, hint: str = "", field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.field = field

    # Errors travel between processes. Pickle would call the class with ``args``, but subclasses take other arguments.
    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.args, self.__dict__))


def _rebuild(kind: type[ForebayError], args: tuple[object, ...], state: dict[str, object]) -> ForebayError:
    # Skips ``__init__``: ``args`` and the state already hold its results.
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidInput(ForebayError, ValueError):
    """A body, a parameter or a setting is wrong; ``field`` names it."""

    code = "invalid_input"
    status = 422


class Unauthorized(ForebayError, PermissionError):
    """The token or the run key is missing or wrong."""

    code = "unauthorized"
    status = 401


class HostNotAllowed(ForebayError, PermissionError):
    """The request's ``Host`` is not an accepted name. It may be a DNS rebinding attack."""

    code = "host_not_allowed"
    status = 421


class ForeignOrigin(ForebayError, PermissionError):
    """A browser sent this request from another site's page."""

    code = "foreign_origin"
    status = 403


class NotFound(ForebayError, LookupError):
    """No object has this id."""

    code = "not_found"
    status = 404


class RunNotFound(NotFound):
    """No run has this id, key or name."""

    code = "run_not_found"

    def __init__(self, run_id: str, *, message: str = "", hint: str = "GET /v1/runs lists the runs") -> None:
        super().__init__(message or f"there is no run {run_id!r}", hint=hint)


class GroupNotFound(NotFound):
    """The run has no group with this id."""

    code = "group_not_found"

    def __init__(self, run_id: str, group_id: str) -> None:
        super().__init__(
            f"run {run_id!r} has no group {group_id!r}", hint=f"GET /v1/runs/{run_id}/groups lists its groups"
        )


class BatchNotFound(NotFound):
    """The run has never issued a batch with this id."""

    code = "batch_not_found"

    def __init__(self, run_id: str, batch_id: str) -> None:
        super().__init__(
            f"run {run_id!r} has no batch {batch_id!r}", hint=f"GET /v1/runs/{run_id}/batches lists its batches"
        )


class CheckpointNotFound(NotFound):
    """The run has no checkpoint for this step. ``known`` lists the steps that have one."""

    code = "checkpoint_not_found"

    def __init__(self, run_id: str, step: int, known: Sequence[int]) -> None:
        super().__init__(
            f"run {run_id!r} has no checkpoint of step {step}; known steps: {', '.join(map(str, known)) or 'none'}",
            hint="rewind to one of them, or use step null to go back to before the first",
        )
        self.known = list(known)


class Conflict(ForebayError):
    """The request conflicts with the current state."""

    code = "conflict"
    status = 409


class BatchAcked(Conflict):
    """The batch is acknowledged, so it can no longer be released or read."""

    code = "batch_acked"

    def __init__(self, batch_id: str) -> None:
        super().__init__(
            f"batch {batch_id!r} is acknowledged", hint="rewind to an earlier checkpoint to get its groups again"
        )


class LeaseLost(Conflict):
    """The batch's groups no longer belong to its reader. ``reason`` says what happened to them."""

    code = "lease_lost"

    def __init__(self, batch_id: str, reason: str) -> None:
        super().__init__(
            f"batch {batch_id!r} is lost: {reason}",
            hint="do not count it as trained: its groups are, or were, delivered in another batch",
        )
        self.reason = reason


class CheckpointConflict(Conflict):
    """The batch cannot be assigned to this checkpoint."""

    code = "checkpoint_conflict"


class BodiesGone(Conflict):
    """Retention removed the bodies of groups, which cannot be redelivered or read. ``group_ids`` lists them."""

    code = "bodies_gone"

    def __init__(self, group_ids: Sequence[str], *, message: str = "", hint: str = "") -> None:
        super().__init__(
            message or f"{len(group_ids)} groups cannot be redelivered: retention has removed their samples' bodies",
            hint=hint or "raise the run's keep_checkpoints or the server's max_journal_bytes to keep more",
        )
        self.group_ids = list(group_ids)


class EnginesPaused(Conflict):
    """The engines are already paused by another request. ``run_id`` is the run for which they were paused."""

    code = "engines_paused"

    def __init__(self, run_id: str, mode: str) -> None:
        super().__init__(
            f"the engines are paused for run {run_id!r} ({mode})",
            hint=f"POST /v1/runs/{run_id}/engines/continue resumes them",
        )
        self.run_id = run_id


class PauseExpired(Conflict):
    """The engines resumed when the pause's time limit expired, possibly with only part of the new weights."""

    code = "pause_expired"

    def __init__(self, limit_s: float) -> None:
        super().__init__(
            f"the engines resumed by themselves after {limit_s:g} s, before they were continued",
            hint="pause them again with a longer limit_s, and load the weights again",
        )


class WeightUpdateFailed(Conflict):
    """A weight update failed on a worker, so the engines were asked to resume. ``worker`` is its address."""

    code = "weight_update_failed"

    def __init__(self, what: str, worker: str, reason: str, num_failed: int = 1, num_workers: int = 1) -> None:
        super().__init__(
            f"{what} failed on {num_failed} of {num_workers} engines, first on {worker}: {reason}",
            hint="the engines resume, some perhaps with the new weights: update again before reading further",
        )
        self.worker = worker


class StartRefused(ForebayError, ValueError):
    """The run cannot start as requested."""

    code = "start_refused"
    status = 400


class UnknownTaskType(StartRefused):
    """No generator serves this task type. ``problems`` names each file that failed or was skipped."""

    code = "unknown_task_type"

    def __init__(self, task_type: str, known: list[str], problems: list[str]) -> None:
        listed = "".join(f"\n- {problem}" for problem in problems)
        super().__init__(
            f"no generator has TASK_TYPE {task_type!r}; known task types: {', '.join(known) or 'none'}"
            + (f"; files that could not be used:{listed}" if listed else ""),
            hint="put a *_generator.py with this TASK_TYPE into a generators folder (--generators DIR)",
            field="task_type",
        )
        self.known = known
        self.problems = problems


class GeneratorBroken(StartRefused):
    """The generator file for this task type exists but cannot be used."""

    code = "generator_broken"


class InputRefused(StartRefused):
    """The input file cannot be read, or one of its rows cannot be used."""

    code = "input_refused"


class RunEnded(ForebayError):
    """The run has ended and everything in it was delivered."""

    code = "run_ended"
    status = 410

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(
            f"run {run_id!r} has ended ({reason}) and has nothing left to deliver", hint="start another run"
        )
        self.reason = reason


class NoRun(ForebayError):
    """No run was started under this name."""

    code = "no_run"
    status = 410

    def __init__(self, name: str) -> None:
        where = f"under the name {name!r}" if name else "yet"
        super().__init__(f"no run was started {where}", hint="POST /start_rollout starts one")


class BodyTooLarge(ForebayError, ValueError):
    """The body exceeds the limit; the rest was not read."""

    code = "body_too_large"
    status = 413

    def __init__(self, limit_bytes: int, setting: str = "max_body_bytes", what: str = "the body is") -> None:
        super().__init__(f"{what} larger than {limit_bytes} bytes", hint=f"send less at once, or raise {setting}")


class BufferFull(ForebayError):
    """The buffer has no room for new groups until the trainer reads some."""

    code = "buffer_full"
    status = 429

    def __init__(self, what: str, retry_after_s: int = 5, *, hint: str = "") -> None:
        hint = hint or "read batches, or raise max_buffer_size/max_buffer_bytes"
        super().__init__(f"the buffer is full ({what})", hint=hint)
        self.retry_after_s = retry_after_s


class StorageFailed(ForebayError, OSError):
    """The disk refused a write; nothing in the request was acknowledged."""

    code = "storage_failed"
    status = 507

    def __init__(
        self,
        reason: str,
        *,
        what: str = "the journal cannot be written",
        hint: str = "the data directory must be writable and have free space; writing then resumes by itself",
    ) -> None:
        super().__init__(f"{what}: {reason}", hint=hint)
        self.reason = reason


class EntryTooLarge(StorageFailed):
    """One item is larger than the journal accepts. Smaller items are still stored."""

    code = "entry_too_large"
    status = 413

    def __init__(self, reason: str) -> None:
        hint = "send less in one request, for example fewer skip_instance_ids in a start"
        super().__init__(reason, what="this cannot be stored", hint=hint)


class BodyUnreadable(StorageFailed):
    """A sample's stored body is missing or damaged; only a backup can restore it."""

    code = "body_unreadable"

    def __init__(self, reason: str) -> None:
        hint = "check the disk, or restore the data directory from a backup"
        super().__init__(reason, what="a stored body cannot be read", hint=hint)


class EngineError(ForebayError):
    """An engine answered with an error; ``status_code`` is the HTTP status it sent."""

    code = "engine_error"
    status = 502

    def __init__(self, message: str, *, status_code: int | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status_code = status_code


class EngineUnavailable(EngineError, ConnectionError):
    """The engine is unreachable, or answers 502 or 503. The rollout waits; it has not failed."""

    code = "engine_unavailable"
    status = 503


class HookFailed(ForebayError):
    """A user's hook raised, hung, died or returned an invalid result. ``traceback`` is stored with the group."""

    code = "hook_failed"
    status = 500

    def __init__(self, hook: str, message: str, traceback: str = "") -> None:
        super().__init__(f"hook {hook} failed: {message}", hint="see the group's traceback")
        self.hook = hook
        self.traceback = traceback


class MissingExtra(ForebayError, ImportError):
    """An optional dependency is not installed."""

    code = "missing_extra"
    status = 501

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed", hint=f"pip install 'forebay[{extra}]'")
        self.add_note(self.hint)  # a traceback ends with it
