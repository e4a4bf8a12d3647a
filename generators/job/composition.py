"""Parts of a job besides its generator, set by the main of the run process before any user code runs."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forebay.core.scheduling.policy import PastRollout, Policy, PolicyInputs, make_policy

if TYPE_CHECKING:  # they import the buffer link, which not every run needs
    from forebay.generators.buffer_link.abc import Plan
    from forebay.generators.job.ports import JobMember, RolloutPlaces


def _nothing(_plan: "Plan") -> Sequence[PastRollout]:
    return ()


@dataclass(frozen=True)
class Composition:
    """Source of a policy's history, and where a job's rollouts run."""

    history: Callable[["Plan"], Sequence[PastRollout]] = _nothing
    places: "RolloutPlaces | None" = None
    """Workers that run the rollouts; with None, this process runs them."""
    member: "JobMember | None" = None
    """In a worker: takes rollouts from the lead, in place of a job."""


_composition = [Composition()]
_of_thread: ContextVar[Composition | None] = ContextVar("composition", default=None)


def compose(composition: Composition) -> None:
    """Set the composition for jobs of this process."""
    _composition[0] = composition


def compose_here(composition: Composition) -> None:
    """Set the composition for this thread and its tasks: a worker may share its process with the lead."""
    _of_thread.set(composition)


def composition() -> Composition:
    """Return the composition for this thread or process."""
    return _of_thread.get() or _composition[0]


def policy_of(plan: "Plan", max_tokens: int, history: Sequence[PastRollout] | None = None) -> Policy:
    """Return the policy that a run's plan names. Raises ``InvalidInput``.

    Without ``history`` it may read files, so call it outside the event loop.
    """
    from forebay.core.scheduling.scheduler import WINDOW, Scheduler  # pydantic takes a moment to import

    settings = plan.scheduler or Scheduler()
    begun = plan.oversampling.begun_per_step if plan.oversampling is not None else None
    window = settings.window or begun or plan.groups_per_step or WINDOW
    if history is None:
        history = composition().history(plan)
    return make_policy(PolicyInputs(settings, window, plan.group_size, max_tokens, history))
