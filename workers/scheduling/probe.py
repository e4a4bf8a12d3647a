"""Runs one rollout of each group first to find long groups, which continue on engines reserved for them."""

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
    """Probes, ranks, offloads and caps ``window`` groups at a time.

    The first rollout of each group, its probe, runs on the least loaded of all engines. When all probes have ended, the
    groups with the longest probes continue on the heavy engines. The others continue where their probe ran, with more
    rollouts at once than usual and a cap on tokens. A rollout that reaches the cap is repeated on a heavy engine.

    A group that already has a sample needs no probe: its length is read from ``history``. A failed or aborted probe has
    no length. Groups without a length are not ranked, and continue with the others' cap. If the buffer has no room for
    a whole window, the groups that have begun are ranked without the others.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        self._settings = inputs.settings
        self._window = inputs.window
        self._engines = HeavyEngines(inputs.settings.heavy)
        self._groups: dict[str, ProbedGroup] = {}
        self._probed: dict[str, ProbedGroup] = {}
        """Groups of the window that is not ranked yet."""
        self._num_probing = 0
        """Number of these groups whose probe has not ended."""
        self._number = 0
        """Number of this window."""
        self._left: dict[int, int] = {}
        """Rollouts left to start in earlier windows, by window number."""
        self._num_left_fast = 0
        """Number of these that are for fast engines."""
        self._probes, self._again, self._heavy, self._elsewhere = (RolloutLine() for _ in range(4))
        """``_again`` has repeated rollouts for heavy engines, ``_elsewhere`` rollouts for any fast engine."""
        self._newest: ProbedGroup | None = None
        """The latest group that began."""
        self._queues = EngineQueues(inputs.settings.fast_concurrency)
        self._history = inputs.history
        self._recent: OrderedDict[str, ProbedGroup] = OrderedDict()
        """Recently closed groups: their remaining rollouts may be submitted again."""

    @property
    def concurrency(self) -> float:
        """Factor on the run's slots that it may fill. Implements ``Policy``, like all methods below."""
        return self._settings.fast_concurrency

    def room(self) -> int:
        """Room for groups of the next window, once no rollout is left to start on fast engines.

        The heavy engines may be one window behind; otherwise all others would wait for them.
        """
        is_behind = self._num_left_fast or any(number < self._number - 1 for number in self._left)
        return 0 if is_behind else max(0, self._window - len(self._probed))

    @cached_property
    def _past(self) -> dict[tuple[InstanceId, int], Measured]:
        # Lazy, because it reads files, and only groups that already have a sample need it.
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
                self._start_rest(entry)
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
        if self._probed and (not self._num_probing or self._is_stopped(loads)):  # no other can join
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
        """Rollouts that run there, except those of the newest group while it waits for room in the buffer."""
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
                group.engine = engine  # its siblings follow, and find their prompt in the cache there
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
        """Whether the buffer has no room until probed groups are complete, and no other probe runs."""
        if not loads.is_buffer_full or len(self._probed) == self._num_probing:
            return False
        # The newest group already has a slot, and waits for room in the buffer.
        return not any(each.is_probing and each.running and each is not self._newest for each in self._probed.values())

    def _rank_if_full(self) -> None:
        # Ranks here, not only in `next`, because ranking makes room for other groups.
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
            self._start_rest(group)

    def _start_rest(self, group: ProbedGroup) -> None:
        for number in group.group.numbers:
            if number != group.probe:
                self._wait(group, number, is_heavy=group.is_long)
        self._drop_if_done(group)

    def _wait(self, group: ProbedGroup, number: int, *, is_heavy: bool, is_again: bool = False) -> None:
        """Queue a rollout. ``is_again``: it is repeated, before all others."""
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
        """Take a rollout out of the queue. Returns whether it is for a heavy engine."""
        is_heavy = group.waiting.pop(number)
        if not group.is_probing:
            self._num_left_fast -= not is_heavy
            self._left[group.window] -= 1
            if not self._left[group.window]:
                del self._left[group.window]
        return is_heavy

    # --- outcomes

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
        if group.is_probing:  # by a cap of another origin
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
        """Do nothing: each choice considers the engines that answer, and requeues rollouts that wait for others."""

    def begin_step(self, number: int) -> None:
        """Do nothing: the length of a probe is also used with the next weights."""

    def _left_engine(self, rollout: RolloutKey) -> tuple[ProbedGroup, bool] | None:
        """Group of a rollout that ran, and whether as a heavy one; None if the group was closed or restarted."""
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
    """The sampled rollout with the lowest number of each group."""
    found: dict[tuple[InstanceId, int], PastRollout] = {}
    for past in history:
        key = past.instance_id, past.epoch
        if past.is_of_this_run and (key not in found or past.number < found[key].number):
            found[key] = past
    return {key: Measured(past.tokens, past.seconds) for key, past in found.items()}
