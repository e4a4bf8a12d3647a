"""One client for several runs, whose groups come in fixed shares."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import Any, NoReturn, TypeVar

from msgspec.structs import replace

from forebay.client.batch_metrics import batch_metrics
from forebay.client.calls.flow import ENDLESS_S
from forebay.client.model import (
    Batch,
    BatchLike,
    CheckpointInfo,
    CheckpointResult,
    EnginePause,
    Evaluation,
    RewindResult,
    Row,
    RunStats,
    WeightUpdate,
    batch_ids,
)
from forebay.client.trainer.buffer_client import BufferClient
from forebay.client.trainer.mixed_batch import MixedBatch, mix, named
from forebay.client.trainer.read_arrays import Image
from forebay.client.trainer.requests import POLL_S
from forebay.client.trainer.shares import Shares
from forebay.core.backoff import Deadline
from forebay.core.errors import CheckpointNotFound, ForebayError, InvalidInput, RunEnded, RunNotFound
from forebay.core.parts import Rows

T = TypeVar("T")


class _Exhausted(RunEnded):
    """A run that did not fail has fewer groups left than its share of a batch."""


class MixedClient(BufferClient):
    """``BufferClient`` for several runs, whose groups it mixes in fixed shares::

        with MixedClient("http://127.0.0.1:8889", {"math": 6, "code": 3, "tools": 1}) as client:
            client.rewind(last_saved_step)
            for batch in client.batches(num_groups=16, step=1):
                train(batch.rows)
                client.checkpoint(batch.step)

    ``runs`` gives each run, by name or id, its weight; of several runs with one name, the newest is mixed. Over the
    whole training each run stays within two groups of its share. ``min_shares`` gives runs a minimum of each batch,
    from 0 to 1, rounded down to groups. ``options`` are those of ``BufferClient``.

    A batch waits for its slowest run: which runs it takes its groups from depends on the checkpoints and on what this
    client holds, never on what is ready. ``clients`` has the client of each run by its name. A method that acts on all
    runs may have acted on some when it fails: repeat it, or rewind.

    Attaches to the runs. Raises ``InvalidInput`` that names the field, for an unknown run, a weight that is not above
    0, or a minimum that is not from 0 to 1.
    """

    def __init__(
        self, url: str, runs: Mapping[str, float], *, min_shares: Mapping[str, float] | None = None, **options: Any
    ) -> None:
        self._shares = Shares(runs, min_shares or {})
        self.clients = {name: BufferClient(url, **options) for name in sorted(runs)}
        try:
            self._names = {_attach(client, name): name for name, client in self.clients.items()}
            if len(self._names) < len(runs):
                raise InvalidInput("two of the runs are the same", field="runs")
            self._count_checkpoints()
        except BaseException:  # of any kind, also Ctrl-C: nobody else could close the clients
            self.close()
            raise

    def _count_checkpoints(self) -> None:
        self._is_exhausted = False
        self._returned = dict[str, int]()
        """The groups of each returned batch that is in no checkpoint, by its id: a release takes them back."""
        for name, client in self.clients.items():
            in_checkpoints = sum(each.num_groups for each in client.checkpoints())
            self._shares.count(name, in_checkpoints - self._shares.delivered[name])

    def _each(self, call: Callable[[BufferClient], T]) -> list[T]:
        return [call(client) for client in self.clients.values()]

    def close(self) -> None:
        """Close the clients of all runs, which release what is still leased; see ``BufferClient.close``."""
        with ExitStack() as closing:
            self._each(closing.enter_context)

    # --- runs

    def start(self, *_: Any, **__: Any) -> NoReturn:
        """Raise ``InvalidInput``: a mix reads runs that exist."""
        raise InvalidInput("a mix reads runs that exist", field="runs", hint="start them with a BufferClient")

    attach = start

    @property
    def run_id(self) -> str:
        """The ids of all runs, joined by ``+``."""
        return "+".join(self._names)

    def runs(self, name: str | None = None) -> list[RunStats]:
        """Every run of the server, or every run with this ``name``, oldest first."""
        return next(iter(self.clients.values())).runs(name)

    def stats(self) -> RunStats:
        """The counts of all runs together; other values are those of a run that failed, or of the first.

        ``settings["group_size"]`` is the largest. Once a read has found a run with fewer groups than its share, the mix
        has ended and none of its groups is ready.
        """
        runs = self._each(BufferClient.stats)
        shown = next((run for run in runs if run.state == "failed"), runs[0])
        values: dict[str, Any] = {
            name: _sum([getattr(run, name) for run in runs]) for name in ("groups", "discarded", "outcomes")
        }
        values["evaluations"] = [evaluation for run in runs for evaluation in run.evaluations]
        if self._is_exhausted:
            values["groups"]["ready"] = 0
        values["has_ended"] = self._is_exhausted or all(run.has_ended for run in runs)
        values["settings"] = {**shown.settings, "group_size": max(run.settings["group_size"] for run in runs)}
        return replace(shown, run_id=self.run_id, name="+".join(self.clients), **values)

    def stop(self) -> RunStats:
        """Stop the processes of all runs."""
        self._each(BufferClient.stop)
        return self.stats()

    def evaluate(self, task: str, step: int) -> Evaluation:
        """Evaluate on a task of the first run that declares it; see ``BufferClient.evaluate``."""
        declared = self._each(lambda client: task in ((client.stats().settings["evaluate"] or {}).get("tasks") or {}))
        index = declared.index(True) if True in declared else 0
        return list(self.clients.values())[index].evaluate(task, step)

    # --- weights

    def set_weight_version(self, version: int) -> None:
        """Announce the version of the weights to all runs."""
        self._each(lambda client: client.set_weight_version(version))

    def _by_engines(self) -> tuple[list[BufferClient], list[BufferClient]]:
        """One client for each list of engines, and the clients of other runs with the same engines."""
        lists = self._each(lambda client: frozenset(client.stats().engine_urls))
        firsts = dict(zip(lists[::-1], list(self.clients.values())[::-1], strict=True)).values()
        return list(firsts), [client for client in self.clients.values() if client not in firsts]

    def update_weights(self, version: int, *args: Any, **options: Any) -> WeightUpdate:
        """Load weights into the engines of all runs; see ``BufferClient.update_weights``."""
        firsts, others = self._by_engines()
        made = [client.update_weights(version, *args, **options) for client in firsts]
        for client in others:
            client.set_weight_version(version)
        workers = sorted({url for each in made for url in each.workers})
        return replace(made[0], workers=workers, paused_s=sum(each.paused_s for each in made))

    @contextmanager
    def paused_engines(self, *args: Any, **options: Any) -> Iterator[EnginePause]:
        """Pause the engines of all runs inside the ``with`` block; see ``BufferClient.paused_engines``."""
        firsts, others = self._by_engines()
        with ExitStack() as pauses:
            made = [pauses.enter_context(client.paused_engines(*args, **options)) for client in firsts]
            yield replace(made[0], workers=sorted({url for each in made for url in each.workers}))
            if options.get("weight_version") is not None:
                for client in others:
                    client.set_weight_version(options["weight_version"])

    # --- batches

    def batches(self, *args: Any, step: int | None = None, drop_last: bool = True, **options: Any) -> Iterator[Batch]:
        """Iterate over batches until a run has fewer groups left than its share; see ``BufferClient.batches``.

        What is left then stays in the buffer, also without ``drop_last``.
        """
        del drop_last
        with suppress(_Exhausted):
            while batch := self.read(*args, step=step, **options):
                yield batch
                step = None if step is None else step + 1

    def read(
        self,
        num_groups: int | None = None,
        batch_size: int | None = None,
        *,
        wait_s: float | None = None,
        **options: Any,
    ) -> MixedBatch | None:
        """Read one batch of ``num_groups`` groups, or None if they are not all ready within ``wait_s`` seconds.

        Raises ``RunEnded`` with the run that has fewer groups than its share, and ``InvalidInput`` for ``batch_size``
        and for a run that is paused with fewer groups than its share.
        """
        if not isinstance(num_groups, int) or num_groups < 1 or batch_size is not None:
            raise InvalidInput(f"a mix is read by num_groups, 1 or more (got {num_groups!r})", field="num_groups")
        began_s, deadline = time.monotonic(), Deadline(ENDLESS_S if wait_s is None else wait_s)
        quotas, parts = self._shares.quotas(num_groups), dict[str, Batch]()
        try:
            for name, quota in quotas.items():
                if (part := self._read_part(name, quota, deadline, options)) is None:
                    return None
                parts[name] = part
        finally:
            if len(parts) < len(quotas):
                for name, quota in quotas.items():
                    self._shares.count(name, -quota)
                for name, part in parts.items():
                    with suppress(ForebayError):  # the error of the read says more; the lease expires
                        self.clients[name].release(part)
        whole = {name: named(part, self.clients[name].run_id) for name, part in parts.items()}
        self._returned.update((part.batch_id, part.num_groups) for part in whole.values())
        return mix(whole, time.monotonic() - began_s)

    def _read_part(self, name: str, quota: int, deadline: Deadline, options: Any) -> Batch | None:
        client, poll_s = self.clients[name], 0.0
        while True:
            with suppress(RunEnded):  # raised below, with more detail
                if batch := client.read(quota, wait_s=min(poll_s, deadline.left_s), **options):
                    return batch
            self._check_can_fill(name, quota, client.stats())
            if not deadline.left_s:
                return None
            poll_s = POLL_S

    def _check_can_fill(self, name: str, quota: int, run: RunStats) -> None:
        num_ready = run.groups.get("ready", 0)
        if run.has_ended and not run.groups.get("open") and num_ready < quota:
            self._is_exhausted = True
            if run.state == "failed":
                raise RunEnded(name, f"failed: {run.reason.partition(chr(10))[0]}")
            raise _Exhausted(name, f"{run.state}, with fewer groups than its share of {quota}")
        if run.is_held and num_ready + run.num_groups_full < quota > run.settings["oversampling"]["groups_per_step"]:
            why = f"run {name!r} is paused until the next weights, with fewer groups than its share of {quota}"
            raise InvalidInput(why, field="num_groups", hint="start it with more oversampling.groups_per_step")

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Numbers about a batch and all its runs, and the share of each run so far, as ``forebay/mix/RUN``."""
        if not isinstance(batch, MixedBatch):
            raise InvalidInput("metrics needs a batch of this client", field="batch")
        made = batch_metrics([(part, self.clients[name].stats()) for name, part in batch.parts.items()])
        delivered = self._shares.delivered
        total = max(1, sum(delivered.values()))
        shares = {f"forebay/mix/{name}": num / total for name, num in delivered.items()}
        return made | shares | {"forebay/wait_s": batch.wait_s}

    def arrays(self, batch: BatchLike, rows: Sequence[Row], *args: Any, **options: Any) -> list[dict[str, Rows]]:
        """Read the side arrays of these rows of a batch, in order; see ``BufferClient.arrays``."""
        return self._of_rows(batch, rows, lambda client, own, few: client.arrays(own, few, *args, **options))

    def images(self, batch: BatchLike, rows: Sequence[Row]) -> list[list[Image]]:
        """Read the images of these rows of a batch, in order; see ``BufferClient.images``."""
        return self._of_rows(batch, rows, lambda client, own, few: client.images(own, few))

    def _of_rows(
        self, batch: BatchLike, rows: Sequence[Row], read: Callable[[BufferClient, str, Sequence[Row]], list[T]]
    ) -> list[T]:
        ids, names = self._by_run(batch), [self._names.get(row.get("run_id", ""), "") for row in rows]
        if not ids.keys() >= set(names):
            raise InvalidInput("rows must be those of the batch", field="rows")
        few = {name: [row for row, run in zip(rows, names, strict=True) if run == name] for name in ids}
        found = {name: iter(read(self.clients[name], own, few[name])) for name, [own] in ids.items()}
        return [next(found[name]) for name in names]

    def annotate(self, uid: str, values: Any, *, batch: BatchLike | None = None, **options: Any) -> None:
        """Store numbers of your own about a sample of ``batch.parts[RUN]``; see ``BufferClient.annotate``."""
        of_runs = self._by_run(batch or [])
        if len(of_runs) != 1:
            raise InvalidInput("batch must be the part of one run", field="batch", hint="pass batch.parts[RUN]")
        for name, [own] in of_runs.items():
            self.clients[name].annotate(uid, values, batch=own, **options)

    # --- checkpoints

    def _by_run(self, batches: BatchLike | Iterable[BatchLike]) -> defaultdict[str, list[str]]:
        """The ids of these batches in each run, by its name."""
        found = defaultdict[str, list[str]](list)
        for run_id, _, own in (part.partition("/") for each in batch_ids(batches) for part in each.split("+")):
            if run_id not in self._names:
                raise InvalidInput(f"not a batch of this client: {run_id}/{own}", field="batch_ids")
            found[self._names[run_id]].append(own)
        return found

    def checkpoint(self, step: int, batches: BatchLike | Iterable[BatchLike] | None = None) -> CheckpointResult:
        """Add batches to the checkpoint of ``step``, which every run gets; see ``BufferClient.checkpoint``."""
        # Also a run without a batch gets it: a rewind must find the step there.
        ids = None if batches is None else self._by_run(batches)
        made = {
            client.run_id: client.checkpoint(step, None if ids is None else ids[name])
            for name, client in self.clients.items()
        }
        added = [f"{run_id}/{own}" for run_id, result in made.items() for own in result.batch_ids]
        for batch_id in added:
            self._returned.pop(batch_id, None)
        checkpoints = _common([each.checkpoints for each in made.values()])
        return CheckpointResult(step=step, batch_ids=added, checkpoints=checkpoints)

    def checkpoints(self) -> list[CheckpointInfo]:
        """The checkpoints to which all runs can be rewound, by step; see ``rewind``."""
        known = {client.run_id: {each.step: each for each in client.checkpoints()} for client in self.clients.values()}
        found = []
        for step in _common(known.values()):
            of_runs = {run_id: steps[step] for run_id, steps in known.items() if step in steps}
            ids = [f"{run_id}/{own}" for run_id, each in of_runs.items() for own in each.batch_ids]
            infos = of_runs.values()
            num_groups, at_s = sum(each.num_groups for each in infos), max(each.at_s for each in infos)
            found.append(CheckpointInfo(step=step, batch_ids=ids, num_groups=num_groups, at_s=at_s))
        return found

    def rewind(self, step: int | None) -> RewindResult:
        """Rewind every run to the checkpoint of ``step``; see ``BufferClient.rewind``.

        A run whose first checkpoint is a later one joined after that step, and is rewound to its beginning.
        """
        known = self._each(lambda client: [each.step for each in client.checkpoints()])
        if step is not None and step not in _common(known):
            raise CheckpointNotFound(self.run_id, step, _common(known))
        done = [
            client.rewind(step if step in steps else None)
            for client, steps in zip(self.clients.values(), known, strict=True)
        ]
        self._count_checkpoints()
        num_batches, num_groups = sum(each.num_batches for each in done), sum(each.num_groups for each in done)
        steps = _common([each.checkpoints for each in done])
        return RewindResult(step=step, num_batches=num_batches, num_groups=num_groups, checkpoints=steps)

    def ack(self, batch: BatchLike) -> None:
        """Mark a batch as used; see ``BufferClient.ack``."""
        for name, [own] in self._by_run(batch).items():
            self.clients[name].ack(own)

    def release(self, batches: BatchLike | Iterable[BatchLike]) -> None:
        """Release batches, which no longer count in the shares; see ``BufferClient.release``."""
        self._is_exhausted = False
        for name, ids in self._by_run(batches).items():
            for own in ids:
                self.clients[name].release(own)
                self._shares.count(name, -self._returned.pop(f"{self.clients[name].run_id}/{own}", 0))


def _attach(client: BufferClient, name: str) -> str:
    """Attach to the newest run of this name, or to the one with this id; return its id."""
    named = client.runs(name)
    try:
        return client.attach(named[-1].run_id if named else name).run_id
    except RunNotFound:
        raise InvalidInput(f"the server has no run {name!r}", field=f"runs.{name}") from None


def _common(of_runs: Collection[Collection[int]]) -> list[int]:
    """The steps that every run has, apart from runs whose first step is later."""
    steps = set[int]().union(*of_runs)
    return sorted(step for step in steps if all(step in own or step < min(own, default=math.inf) for own in of_runs))


def _sum(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {key: sum(each.get(key, 0) for each in counts) for key in dict.fromkeys(chain.from_iterable(counts))}
