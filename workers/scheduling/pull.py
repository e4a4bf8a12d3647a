"""The default: the next rollout in the order of the file goes to the least loaded engine."""

from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import NextRollout, PolicyInputs, RolloutEnd, RolloutKey, WaitingGroup
from forebay.workers.scheduling.started_groups import StartedGroup, StartedGroups
from forebay.workers.scheduling.waiting_groups import WaitingGroups


class Pull:
    """Nearly complete groups first, then those that came first.

    The rollouts of a group go to its engine, which has their prompt in its cache, while that has at most ``affinity``
    times the least load.
    """

    concurrency = 1.0

    def __init__(self, inputs: PolicyInputs) -> None:
        self._affinity = inputs.settings.affinity
        self._waiting = WaitingGroups(inputs.window)
        self._started = StartedGroups()

    def room(self) -> int:
        """Of ``Policy``, as all below."""
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

    def ended(self, rollout: RolloutKey, end: RolloutEnd) -> None:  # noqa: ARG002 - how long it took changes nothing
        self._started.ended(rollout)

    def broken(self, rollout: RolloutKey, tokens: int, seconds: float) -> None:  # noqa: ARG002 - none has a cap here
        self._started.again(rollout)

    def lost(self, rollout: RolloutKey) -> None:
        self._started.again(rollout)

    def closed(self, group: str) -> None:
        self._waiting.drop(group)
        self._started.drop(group)

    def engine_lost(self, url: str) -> None:
        """Nothing is bound to an engine: each choice looks at those that answer."""

    def begin_step(self, number: int) -> None:
        """Steps make no difference."""
