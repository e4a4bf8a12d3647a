"""Calls a method on a group: lays arguments out over its workers, runs the calls, and collects the results."""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from forebay.core.errors import InvalidInput
from forebay.workers.groups.bound_method import BoundMethod, functions_of
from forebay.workers.groups.call import GroupCall, Outputs, gather, materialized, waits_for
from forebay.workers.groups.dispatch import NOT_CALLED, DispatchFunctions, LaidOut
from forebay.workers.groups.group_workers import ChooseRank, GroupWorkers, RepeatedCall
from forebay.workers.groups.mapping import MapCall
from forebay.workers.groups.register import Execute
from forebay.workers.members.worker_spec import MethodCall

Collect = Callable[[Outputs], Any]


class MethodCaller:
    """Calls one method of one role on a group's workers."""

    def __init__(self, group: Any, workers: GroupWorkers, method: BoundMethod, label: str) -> None:
        self._group, self._workers = group, workers
        self._method, self._label = method, label
        self._functions: DispatchFunctions | None = None if method.is_map else functions_of(method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method. Returns values or a ``GroupCall``, as registered."""
        call = self.begin(*args, **kwargs)
        if self._method.is_map or not self._method.registration["blocking"]:
            return call
        return got(call)

    def begin(self, *args: Any, **kwargs: Any) -> GroupCall[Any]:
        """Start a call and return without waiting for it."""
        if self._method.is_map:
            return self._map(*args, **kwargs)
        return self._begun(self._by_mode, self._collect, args, kwargs)

    def whole(self, *args: Any, **kwargs: Any) -> GroupCall[Any]:
        """Call on all workers in any mode, for a list of results. Lists as long as the group give each its own item."""
        return self._begun(self._to_all, _listed, args, kwargs)

    def on(self, rank: int, function: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> GroupCall[Any]:
        """Call the method, or ``function``, on one worker, with unchanged arguments and result."""

        def send(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, RepeatedCall]:
            return {rank: self._attempts(partial(_always, rank), args, kwargs, function)}

        return self._begun(send, _only, args, kwargs)

    def _begun(
        self,
        send: Callable[[Sequence[Any], Mapping[str, Any]], Mapping[int, RepeatedCall]],
        collect: Collect,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> GroupCall[Any]:
        outputs: Future[Outputs] = Future()

        def send_later() -> None:
            try:
                values = _values(args, kwargs)
                if not outputs.cancelled():
                    self._gather(send(*values), outputs)
            except BaseException as error:  # noqa: BLE001 - passed to the caller, in another thread
                with suppress(Exception):  # already cancelled
                    outputs.set_exception(error)

        if not waits_for(args, kwargs):
            self._gather(send(args, kwargs), outputs)
        elif self._method.registration["materialize_futures"]:
            self._gather(send(*_values(args, kwargs)), outputs)
        else:
            threading.Thread(target=send_later, name=f"call {self._label}", daemon=True).start()
        return GroupCall(self._label, outputs, collect)

    def _gather(self, attempts: Mapping[int, RepeatedCall], outputs: "Future[Outputs]") -> None:
        futures = {rank: each.outcome for rank, each in attempts.items()}
        gather(outputs, self._label, futures, self._workers.world_size, lambda rank: attempts[rank].rank)

    def _by_mode(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[int, RepeatedCall]:
        execute = self._method.registration["execute_mode"]
        if execute is Execute.ANY:
            return {0: self._attempts(self._workers.least_busy, args, kwargs)}
        if execute is Execute.RANK_ZERO and not self._method.lays_out:
            return {0: self._attempts(partial(_always, 0), args, kwargs)}
        assert self._functions is not None
        laid_out = self._checked(self._functions["dispatch_fn"](self._group, *args, **kwargs))
        ranks = range(self._workers.world_size if execute is Execute.ALL else 1)
        return self._send_laid_out(laid_out, ranks)

    def _to_all(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[int, RepeatedCall]:
        size, values = self._workers.world_size, (*args, *kwargs.values())
        if values and all(isinstance(value, list) and len(value) == size for value in values):
            return self._send_laid_out((tuple(args), dict(kwargs)), range(size))
        return {rank: self._attempts(partial(_always, rank), args, kwargs) for rank in range(size)}

    def _send_laid_out(self, laid_out: LaidOut, ranks: range) -> dict[int, RepeatedCall]:
        lists, named = laid_out
        sent: dict[int, RepeatedCall] = {}
        for rank in ranks:
            args = [each[rank] for each in lists]
            kwargs = {name: each[rank] for name, each in named.items()}
            if not any(each is NOT_CALLED for each in (*args, *kwargs.values())):
                sent[rank] = self._attempts(partial(_always, rank), args, kwargs)
        return sent

    def _collect(self, outputs: Outputs) -> Any:
        is_one = self._method.registration["execute_mode"] is not Execute.ALL and not self._method.lays_out
        if is_one or self._functions is None:
            return _only(outputs)
        return self._functions["collect_fn"](self._group, _listed(outputs))

    def _map(self, *args: Any, **kwargs: Any) -> MapCall:
        if not args:
            raise InvalidInput(
                f"{self._label} iterates over its first argument, by position: there is none",
                field="0",
                hint=f"call group.{self._label}(items)",
            )
        items, *others = args
        values: Callable[[], tuple[list[Any], dict[str, Any]]] = partial(_values, others, kwargs)
        if self._method.registration["materialize_futures"]:
            waited = values()
            items, values = materialized(items), lambda: waited
        else:
            items = _later(items)

        def send(item: Any, choose: ChooseRank) -> RepeatedCall:
            rest, named = values()
            return self._attempts(choose, [item, *rest], named)

        return MapCall(self._label, items, send, self._workers)

    def _attempts(
        self,
        choose: ChooseRank,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        function: Callable[..., Any] | None = None,
    ) -> RepeatedCall:
        registration = self._method.registration
        call = MethodCall(
            self._method.role,
            self._method.name,
            tuple(args),
            dict(kwargs),
            function,
            None if function else registration["deadline_s"],
        )
        return RepeatedCall(self._workers, call, choose=choose, retries=0 if function else registration["retries"])

    def _checked(self, laid_out: Any) -> LaidOut:
        try:
            lists, named = laid_out
            lengths = [len(each) for each in (*lists, *named.values())]
        except (TypeError, ValueError, AttributeError):
            lengths = [-1]
        if any(length != self._workers.world_size for length in lengths):
            raise InvalidInput(
                f"the dispatch function of {self._label} returned no list with {self._workers.world_size} entries"
                " for each argument",
                field="dispatch_fn",
                hint="it must return (tuple of lists, dict of lists), each list with one entry per worker",
            )
        return laid_out  # type: ignore[no-any-return]


def got(call: GroupCall[Any]) -> Any:
    """Wait for the value of a call. Ctrl-C also cancels the call."""
    try:
        return call.get()
    except KeyboardInterrupt:
        call.cancel()
        raise


def _always(rank: int, failed_on: Collection[int]) -> int:  # noqa: ARG001 - arguments were laid out for this rank
    return rank


def _listed(outputs: Outputs) -> list[Any]:
    return list(outputs.values())


def _only(outputs: Outputs) -> Any:
    (output,) = outputs.values()
    return output


def _values(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    return [materialized(each) for each in args], {name: materialized(each) for name, each in kwargs.items()}


def _later(items: Any) -> Iterator[Any]:
    yield from materialized(items)
