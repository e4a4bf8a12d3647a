"""Whose fault a failed rollout is: what user code may raise to say so, and how often each is tried again."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from forebay.core.errors import EngineError, ForebayError, InvalidInput
from forebay.core.outcome import RolloutOutcome

REFUSALS = frozenset({400, 413, 422})
"""Statuses by which an engine says that the request is wrong, a prompt that is too long among it."""
ENGINE_WAIT_S = 1_800.0
BUDGETED = (
    RolloutOutcome.ENGINE_FAILURE,
    RolloutOutcome.AGENT_FAILURE,
    RolloutOutcome.ENVIRONMENT_FAILURE,
    RolloutOutcome.JUDGE_FAILURE,
)
"""Failures that have a budget of retries each."""


class RolloutFailed(ForebayError):
    """Base of what a rollout function raises to say whose fault it is. Anything else that it raises is its own."""

    code = "rollout_failed"
    outcome: ClassVar[RolloutOutcome] = RolloutOutcome.AGENT_FAILURE


class AgentFailed(RolloutFailed):
    """The agent broke: it crashed, hung, or did what it must not do."""

    code = "agent_failed"


class EnvironmentFailed(RolloutFailed):
    """What the agent works on broke: a sandbox, a tool's server, a simulator."""

    code = "environment_failed"
    outcome = RolloutOutcome.ENVIRONMENT_FAILURE


class EngineWaitOver(EnvironmentFailed):
    """No engine answered for as long as a rollout of the run waits for one. It is not tried again."""

    code = "engine_wait_over"

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"no engine answered for {limit_s:g} s", hint="start an engine, or raise engine_wait_s")


class JudgeFailed(RolloutFailed):
    """The rollout came to its end, and nobody can say how good it is. Reward functions may raise it too."""

    code = "judge_failed"
    outcome = RolloutOutcome.JUDGE_FAILURE


def outcome_of(error: BaseException) -> RolloutOutcome:
    """How a rollout ended whose function raised ``error``, or raised something ``from`` it."""
    outcomes = map(_own_outcome, _causes(error))
    return next(filter(None, outcomes), RolloutOutcome.AGENT_FAILURE)


def retry_budgets(given: Mapping[str, Any] | None, max_attempts: int) -> dict[RolloutOutcome, int]:
    """How often a rollout is tried again after each kind of failure: as ``given``, else ``max_attempts`` - 1 times.

    Numbers may be strings. Raises ``InvalidInput``.
    """
    # Every kind has a number of its own: a failing engine must not use up the retries of the agent.
    budgets = dict.fromkeys(BUDGETED, max_attempts - 1)
    if given is None:
        return budgets
    if not isinstance(given, Mapping):
        raise _wrong_budgets(f"it is {given!r:.100}")
    for name, number in given.items():
        if name not in BUDGETED:
            raise _wrong_budgets(f"it has {name!r:.100}")
        budgets[RolloutOutcome(name)] = _retries(name, number)
    return budgets


def _retries(name: str, given: object) -> int:
    try:
        number = int(given) if isinstance(given, int | str) and not isinstance(given, bool) else -1
    except ValueError:
        number = -1
    if number < 0:
        raise _wrong_budgets(f"{name} is {given!r:.100}")
    return number


def _wrong_budgets(problem: str) -> InvalidInput:
    names = ", ".join(BUDGETED)
    return InvalidInput(
        f"retry_budgets must be an object from {names} to whole numbers, {problem}",
        hint='{"engine_failure": 5, "judge_failure": 0}: so many retries after each kind of failure',
        field="retry_budgets",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from; of a group its first member."""
    # A chain of causes may be a ring.
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
