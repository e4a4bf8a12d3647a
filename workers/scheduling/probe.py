"""One rollout of each group runs first, and tells which groups are long; those go on at engines of their own."""

from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property

from forebay.core.ids import InstanceId
from forebay.core.scheduling.engine_loads import EngineLoads
from forebay.core.scheduling.policy import NextRollout, PastRollout, PolicyInputs, RolloutEnd, RolloutKey, WaitingGroup
from forebay.workers.scheduling.heavy_engines import HeavyEngines
from forebay.workers.scheduling.probe_ranking import Measured, cap_tokens, cut_of, top_of
from forebay.workers.scheduling.rollout_line import EngineQueues, ProbedGroup, RolloutLine


class Probe:
    """Probe, rank, offload, break, for ``window`` groups at a time.

    The first rollout of each group runs on the least loaded of all engines. When all of these probes are there, the
    groups with the longest go on at the heavy engines. The others go on where their probe ran: several times the usual
    number at once, and each may sample no more than a cap. One that is broken by it is run again at a heavy engine.

    A group that has a sample already needs no probe: how long that was is known from ``history``. A probe that failed
    or was aborted tells nothing. Groups of which nothing is known are not ranked, and go on with the others' cap.
    Where the buffer has no room for the groups of a whole window, those that have begun are ranked without the others.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        self._settings = inputs.settings
        self._window = inputs.window
        self._engines = HeavyEngines(inputs.settings.heavy)
        self._groups: dict[str, ProbedGroup] = {}
        self._probed: dict[str, ProbedGroup] = {}
        """Those of the window that is not ranked yet."""
        self._num_probing = 0
        """Of these, the ones whose probe is not there."""
        self._number = 0
        """Of this window."""
        self._left: dict[int, int] = {}
        """Rollouts of the windows before it that are to be started, where there are any."""
        self._num_left_fast = 0
        """Of these, the ones that are not for heavy engines."""
        self._probes, self._again, self._heavy, self._elsewhere = (RolloutLine() for _ in range(4))
        """``again`` is for heavy engines once more, ``elsewhere`` for any fast one."""
        self._newest: ProbedGroup | None = None
        """The group that began last."""
        self._queues = EngineQueues(inputs.settings.fast_concurrency)
        self._history = inputs.history
        self._recent: OrderedDict[str, ProbedGroup] = OrderedDict()
        """Groups that were closed lately: what is left of them may be submitted again."""

    @property
    def concurrency(self) -> float:
        """Of ``Policy``, as all below."""
        return self._settings.fast_concurrency

    def room(self) -> int:
        """Those of the next window, once the fast engines have nothing left to start.

        The heavy ones may be behind by one window: else all others would wait for them.
        """
        is_behind = self._num_left_fast or any(number < self._number - 1 for number in self._left)
        return 0 if is_behind else max(0, self._window - len(self._probed))

    @cached_property
    def _past(self) -> dict[tuple[InstanceId, int], Measured]:
        # Not before a group has a sample: it is read from files, and most runs never need it.
        return _first_of_this_run(self._history)

    def submit(self, group: WaitingGroup) -> None:
        probe = None if group.taken else group.numbers[0]
        entry = ProbedGroup(group, self._number, probe, probe is not None, has_begun=group.is_open)
        self._groups[group.group] = entry
        before = self._recent.pop(group.group, None)
        if probe is None and before is not None:
            entry.measured, entry.engine = before.measured, before.engine
            if before.window < self._number:
                entry.window, entry.is_long, entry.cap = before.window, before.is_long, before.cap
                self._go_on(entry)
                return
        self._probed[group.group] = entry
        if probe is not None:
            self._num_probing += 1
            self._wait(entry, probe, is_heavy=False)
        elif before is None:
            entry.measured = self._past.get((group.instance_id, group.epoch))

    # --- what comes next

    def next(self, loads: EngineLoads) -> NextRollout | None:
        if self._engines.update(loads):
            for group, number in self._queues.keep(self._engines.fast):
                self._elsewhere.add(group, number)
        if self._probed and (not self._num_probing or self._is_stopped(loads)):  # no other group has come, or can
            self._rank()
        return self._next_heavy(loads) or self._next_fast(loads) or self._next_probe(loads)

    def _next_heavy(self, loads: EngineLoads) -> NextRollout | None:
        engine = loads.least(self._engines.heavy)
        if engine is None or self._num_at(engine, loads) >= loads.places(engine):
            return None
        lines = [self._again, self._heavy] if self._engines.fast else [self._again, self._heavy, self._elsewhere]
        for line in lines:
            if (found := line.take(may_begin=loads.may_begin)) is not None:
                return self._start(*found, engine)
        return None

    def _num_at(self, engine: str, loads: EngineLoads) -> int:
        """Rollouts that run there, without what waits for room that only others can make."""
        waiting = self._newest.running.values() if loads.is_buffer_full and self._newest is not None else ()
        return loads.in_flight(engine) - sum(url == engine for url, _ in waiting)

    def _next_fast(self, loads: EngineLoads) -> NextRollout | None:
        while (placed := self._queues.take(loads)) is None:
            engine = loads.least(self._engines.fast)
            if engine is None or not self._queues.has_room(engine, loads):
                return None
            found = self._elsewhere.take(may_begin=loads.may_begin)
            if found is None:
                return None
            group, number = found
            if group.engine not in self._engines.fast:
                group.engine = engine  # for its siblings as well, which find their prompt in the cache there
                return self._start(group, number, engine, cap=group.cap)
            self._queues.add(group, number)
        group, number = placed
        return self._start(group, number, group.engine, cap=group.cap)

    def _next_probe(self, loads: EngineLoads) -> NextRollout | None:
        engine = loads.least()
        if engine is None or not loads.has_place:
            return None
        found = self._probes.take(may_begin=loads.may_begin)
        return None if found is None else self._start(*found, engine)

    def _start(self, group: ProbedGroup, number: int, engine: str | None, cap: int | None = None) -> NextRollout:
        assert engine is not None
        is_heavy = self._take_out(group, number)
        if group.is_probing:
            group.engine = engine
        if not group.has_begun:
            group.has_begun, self._newest = True, group
        group.running[number] = engine, is_heavy
        self._queues.entered(engine)
        return NextRollout(RolloutKey(group.group.group, number), engine, cap)

    # --- ranking

    def _is_stopped(self, loads: EngineLoads) -> bool:
        """Whether the buffer has no room until groups are whole, of which the probes are there, and no others run."""
        if not loads.is_buffer_full or len(self._probed) == self._num_probing:
            return False
        # The newest group has been given a place, and is what waits for room.
        return not any(each.is_probing and each.running and each is not self._newest for each in self._probed.values())

    def _rank_if_full(self) -> None:
        # Not only when something is asked for: there is room for others then.
        if not self._num_probing and len(self._probed) >= self._window:
            self._rank()

    def _rank(self) -> None:
        window = [group for group in self._probed.values() if not group.is_probing]
        self._probed = {key: group for key, group in self._probed.items() if group.is_probing}
        self._number += 1
        for group in self._probed.values():
            group.window = self._number
        ranked = [(group, group.measured) for group in window if group.measured is not None]
        top = top_of([getattr(measured, self._settings.by) for _, measured in ranked], self._settings.top)
        cut = cut_of([measured.tokens for _, measured in ranked], top)
        for position in top:
            ranked[position][0].is_long = True
        for group in sorted(window, key=_longest_first):
            own = None if group.measured is None else group.measured.tokens
            group.cap = cap_tokens(self._settings.cap, cut, own)
            self._go_on(group)

    def _go_on(self, group: ProbedGroup) -> None:
        for number in group.group.numbers:
            if number != group.probe:
                self._wait(group, number, is_heavy=group.is_long)
        self._drop_if_done(group)

    def _wait(self, group: ProbedGroup, number: int, *, is_heavy: bool, is_again: bool = False) -> None:
        """A rollout is to be started; once more, and then before all others, if it is ``is_again``."""
        group.waiting[number] = is_heavy
        if group.is_probing:
            self._probes.add(group, number, is_first=is_again)
            return
        self._left[group.window] = self._left.get(group.window, 0) + 1
        self._num_left_fast += not is_heavy
        if is_heavy:
            (self._again if is_again else self._heavy).add(group, number)
        elif group.engine in self._engines.fast:
            self._queues.add(group, number, is_first=is_again)
        else:
            self._elsewhere.add(group, number, is_first=is_again)

    def _take_out(self, group: ProbedGroup, number: int) -> bool:
        """It does not wait any more; whether it is for a heavy engine."""
        is_heavy = group.waiting.pop(number)
        if not group.is_probing:
            self._num_left_fast -= not is_heavy
            self._left[group.window] -= 1
            if not self._left[group.window]:
                del self._left[group.window]
        return is_heavy

    # --- what becomes of it

    def ended(self, rollout: RolloutKey, end: RolloutEnd) -> None:
        if (left := self._left_engine(rollout)) is None:
            return
        group, _ = left
        if group.is_probing:
            self._note_probe(group, Measured(end.tokens, end.seconds) if end.ending == "finished" else None)
        self._drop_if_done(group)
        self._rank_if_full()

    def broken(self, rollout: RolloutKey, tokens: int, seconds: float) -> None:
        if (left := self._left_engine(rollout)) is None:
            return
        group, _ = left
        if group.is_probing:  # by a cap that is not ours
            self._note_probe(group, Measured(tokens, seconds))
        self._wait(group, rollout.number, is_heavy=True, is_again=True)
        self._rank_if_full()

    def lost(self, rollout: RolloutKey) -> None:
        if (left := self._left_engine(rollout)) is not None:
            group, is_heavy = left
            self._wait(group, rollout.number, is_heavy=is_heavy, is_again=True)

    def closed(self, group: str) -> None:
        entry = self._groups.pop(group, None)
        if entry is None:
            return
        self._probed.pop(group, None)
        for number in list(entry.waiting):
            self._take_out(entry, number)
        for engine, _ in entry.running.values():
            self._queues.left(engine)
        entry.running.clear()
        if entry.is_probing:
            self._num_probing -= 1
        else:
            self._recent[group] = entry
            if len(self._recent) > self._window:
                self._recent.popitem(last=False)

    def engine_lost(self, url: str) -> None:
        """Nothing: each choice looks at the engines that answer, and what waits for others goes elsewhere."""

    def begin_step(self, number: int) -> None:
        """Nothing: what a probe says of its group holds for the next weights as well."""

    def _left_engine(self, rollout: RolloutKey) -> tuple[ProbedGroup, bool] | None:
        """The group of a rollout that ran, and whether on a heavy engine; None if it was closed, or begun afresh."""
        group = self._groups.get(rollout.group)
        if group is None or rollout.number not in group.running:
            return None
        engine, is_heavy = group.running.pop(rollout.number)
        self._queues.left(engine)
        return group, is_heavy

    def _note_probe(self, group: ProbedGroup, measured: Measured | None) -> None:
        group.measured = measured
        group.is_probing = False
        self._num_probing -= 1

    def _drop_if_done(self, group: ProbedGroup) -> None:
        key = group.group.group
        if not (group.waiting or group.running or key in self._probed):
            del self._groups[key]


def _longest_first(group: ProbedGroup) -> float:
    return 0.0 if group.measured is None else -group.measured.tokens


def _first_of_this_run(history: Iterable[PastRollout]) -> dict[tuple[InstanceId, int], Measured]:
    """Of each group the rollout with the lowest number that has a sample."""
    found: dict[tuple[InstanceId, int], PastRollout] = {}
    for past in history:
        key = past.instance_id, past.epoch
        if past.is_of_this_run and (key not in found or past.number < found[key].number):
            found[key] = past
    return {key: Measured(past.tokens, past.seconds) for key, past in found.items()}
