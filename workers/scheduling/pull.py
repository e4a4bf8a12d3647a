"""The default policy: sends the next rollout in the order of the file to the least loaded engine."""

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import NextRollout, PolicyInputs, RolloutEnd, RolloutKey, WaitingGroup
from forebay.workers.scheduling.started_groups import StartedGroup, StartedGroups
from forebay.workers.scheduling.waiting_groups import WaitingGroups


class Pull:
    """Starts rollouts of nearly complete groups first, then in order of submission.

    The rollouts of a group go to its engine, whose cache has their prompt, while its load is at most ``affinity`` times
    the least load.
    """

    concurrency = 1.0

    def __init__(self, inputs: PolicyInputs) -> None:
        self._affinity = inputs.settings.affinity
        self._waiting = WaitingGroups(inputs.window)
        self._started = StartedGroups()

    def room(self) -> int:
        """Number of further groups it accepts. Implements ``Policy``, like all methods below."""
        return self._waiting.room

    def submit(self, group: WaitingGroup) -> None:
        if group.is_open:
            self._started.begin(group)
        else:
            self._waiting.submit(group)

    def next(self, loads: EngineLoads) -> NextRollout | None:
        started = self._started.first()
        if started is None and loads.may_begin:
            started = self._begun()
        if started is None:
            return None
        engine = started.choose_engine(loads, self._affinity)
        return NextRollout(self._started.take(started), engine)

    def _begun(self) -> StartedGroup | None:
        group = self._waiting.oldest
        return None if group is None else self._started.begin(self._waiting.begin(group.group))

    def ended(self, rollout: RolloutKey, end: RolloutEnd) -> None:  # noqa: ARG002 - its length does not matter
        self._started.ended(rollout)

    def broken(self, rollout: RolloutKey, tokens: int, seconds: float) -> None:  # noqa: ARG002 - this policy sets no cap
        self._started.again(rollout)

    def lost(self, rollout: RolloutKey) -> None:
        self._started.again(rollout)

    def closed(self, group: str) -> None:
        self._waiting.drop(group)
        self._started.drop(group)

    def engine_lost(self, url: str) -> None:
        """Do nothing: rollouts are not bound to engines, and each choice considers those that answer."""

    def begin_step(self, number: int) -> None:
        """Do nothing: steps do not affect the policy."""
