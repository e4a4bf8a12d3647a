"""Kinds of failed rollouts: the errors that user code may raise, and the number of retries per kind."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from forebay.core.errors import EngineError, ForebayError, InvalidInput
from forebay.core.outcome import RolloutOutcome

REFUSALS = frozenset({400, 413, 422})
"""Statuses by which an engine rejects an invalid request, for example an overlong prompt."""
ENGINE_WAIT_S = 1_800.0
BUDGETED = (
    RolloutOutcome.ENGINE_FAILURE,
    RolloutOutcome.AGENT_FAILURE,
    RolloutOutcome.ENVIRONMENT_FAILURE,
    RolloutOutcome.JUDGE_FAILURE,
)
"""Failures with a separate retry budget each."""


class RolloutFailed(ForebayError):
    """Base of errors by which a rollout function names the kind of failure. Any other error is an agent failure."""

    code = "rollout_failed"
    outcome: ClassVar[RolloutOutcome] = RolloutOutcome.AGENT_FAILURE


class AgentFailed(RolloutFailed):
    """The agent failed: it crashed, hung, or did something forbidden."""

    code = "agent_failed"


class EnvironmentFailed(RolloutFailed):
    """The agent's environment failed: a sandbox, a tool's server, a simulator."""

    code = "environment_failed"
    outcome = RolloutOutcome.ENVIRONMENT_FAILURE


class EngineWaitOver(EnvironmentFailed):
    """No engine answered for ``limit_s`` seconds, the longest that a rollout waits. It is not retried."""

    code = "engine_wait_over"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"no engine answered for {limit_s:g} s", hint="start an engine, or raise engine_wait_s")


class JudgeFailed(RolloutFailed):
    """The rollout completed but cannot be scored. Reward functions may raise this too."""

    code = "judge_failed"
    outcome = RolloutOutcome.JUDGE_FAILURE


def outcome_of(error: BaseException) -> RolloutOutcome:
    """Return the outcome of a rollout whose function raised ``error``, or raised another error ``from`` it."""
    outcomes = map(_own_outcome, _causes(error))
    return next(filter(None, outcomes), RolloutOutcome.AGENT_FAILURE)


def retry_budgets(given: Mapping[str, Any] | None, max_attempts: int) -> dict[RolloutOutcome, int]:
    """Return the retries of a rollout after each kind of failure: as ``given``, else ``max_attempts`` - 1.

    Numbers may be strings. Raises ``InvalidInput``.
    """
    # Separate budgets: a failing engine must not use up the retries of the agent.
    budgets = dict.fromkeys(BUDGETED, max_attempts - 1)
    if given is None:
        return budgets
    if not isinstance(given, Mapping):
        raise _wrong_budgets(f"got {given!r:.100}")
    for name, number in given.items():
        if name not in BUDGETED:
            raise _wrong_budgets(f"unknown name {name!r:.100}")
        budgets[RolloutOutcome(name)] = _retries(name, number)
    return budgets


def _retries(name: str, given: object) -> int:
    try:
        number = int(given) if isinstance(given, int | str) and not isinstance(given, bool) else -1
    except ValueError:
        number = -1
    if number < 0:
        raise _wrong_budgets(f"{name}: got {given!r:.100}")
    return number


def _wrong_budgets(problem: str) -> InvalidInput:
    names = ", ".join(BUDGETED)
    return InvalidInput(
        f"retry_budgets must be an object of whole numbers by kind of failure ({names}): {problem}",
        hint='set the retries per kind of failure, for example {"engine_failure": 5, "judge_failure": 0}',
        field="retry_budgets",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its chain of causes, following the first member of exception groups."""
    # A chain of causes may be a cycle.
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error.__cause__


def _own_outcome(error: BaseException) -> RolloutOutcome | None:
    import openai  # slow to import, and loaded already where rollouts run

    if isinstance(error, RolloutFailed):
        return error.outcome
    if isinstance(error, EngineError | openai.APIError):
        is_refusal = getattr(error, "status_code", None) in REFUSALS
        return RolloutOutcome.AGENT_FAILURE if is_refusal else RolloutOutcome.ENGINE_FAILURE
    return None
