"""Workers for the contract of worker groups, sent to other processes by value: they need not find the tests."""

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np

from forebay.workers.groups import Dispatch, Execute, Worker, register

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def two_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Any:
    """Lists of two, given to the workers in turn."""

    def spread(pair: list[Any]) -> list[Any]:
        return [pair[rank % 2] for rank in range(worker_group.world_size)]

    return tuple(map(spread, args)), {name: spread(pair) for name, pair in kwargs.items()}


def as_they_are(worker_group: Any, outputs: list[Any]) -> list[Any]:
    return outputs


class Member(Worker):
    """Adds to the number that it was made with."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.pid_at_first = os.getpid()
        self.calls: list[str] = []
        self.tries = 0

    @property
    def broken(self) -> int:
        raise AssertionError("a property was evaluated")

    @register(Dispatch.DP_COMPUTE_PROTO)
    def add(self, numbers: Any) -> Any:
        if isinstance(numbers, np.ndarray):
            numbers += self.number + self.rank  # in place: the caller's must not change
            return numbers
        return [each + self.number + self.rank for each in numbers]

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    async def twice(self, numbers: list[int]) -> list[int]:
        await asyncio.sleep(0)
        return [each * 2 + self.number + self.rank for each in numbers]

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False, materialize_futures=False)
    def add_when_there(self, numbers: list[int]) -> list[int]:
        return [each + self.number + self.rank for each in numbers]

    @register(Dispatch.DP_COMPUTE_PROTO)
    def by_key(self, batch: dict[str, Any], *, weights: Any) -> dict[str, Any]:
        return {"sums": batch["x"] + weights, "rows": [(self.rank, row) for row in batch["rows"]]}

    @register(Dispatch.DP_COMPUTE_PROTO)
    def share(self, numbers: list[int]) -> list[tuple[int, int]]:
        return [(self.rank, len(numbers))]

    @register(Dispatch.DP_COMPUTE_PROTO)
    def largest(self, numbers: list[int]) -> int:
        return max(numbers)

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Any, numbers: list[int]) -> list[int]:
        return [function(each) for each in numbers]

    @register(Dispatch.DP_COMPUTE_METRIC)
    def mean(self, numbers: list[int]) -> float:
        return sum(numbers) / len(numbers)

    @register(Dispatch.ONE_TO_ALL)
    def foo(self, number: int) -> int:
        return self.number + number

    @register()
    def sum_up(self, x: int, y: int) -> int:
        return self.number + x + y

    @register(Dispatch.DP_COMPUTE)
    def sum_of_dp(self, x: int, y: int) -> int:
        return self.number + x + y

    @register({"dispatch_fn": two_to_all, "collect_fn": as_they_are})
    def sum_of_two(self, x: int, y: int) -> int:
        return self.number + x + y

    @register(Dispatch.ONE_TO_ALL)
    def whole(self, value: list[Any]) -> list[Any]:
        return value

    @register(execute_mode=Execute.RANK_ZERO)
    def of_rank_zero(self, x: Any, y: int = 0) -> Any:
        return self.rank, x, y

    @register({"dispatch_fn": two_to_all, "collect_fn": as_they_are}, Execute.RANK_ZERO)
    def first_of_two(self, x: int) -> int:
        return x

    @register(Dispatch.ONE_TO_ALL, Execute.ANY, blocking=False)
    async def anywhere(self, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return self.rank

    @register(Dispatch.MAP)
    def square(self, number: int, plus: int = 0) -> int:
        return number * number + plus

    @register(Dispatch.MAP)
    def square_unless(self, number: int, unless: int) -> int:
        if number == unless:
            raise ValueError(f"not {number}")
        return number * number

    @register(Dispatch.MAP, retries=2)
    async def where_it_is_not(self, number: int, rank: int) -> int:
        if self.rank == rank:
            raise ConnectionError("not here")
        return number

    @register(Dispatch.MAP)
    def where(self, number: int) -> int:
        return self.rank

    @register(Dispatch.MAP)
    async def square_later(self, number: int, seconds: float = 0.0) -> int:
        await asyncio.sleep(seconds)
        return number * number

    @register(Dispatch.ONE_TO_ALL)
    def place(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.local_rank,
            "local_world_size": self.local_world_size,
            "node": self.node,
            "pid": os.getpid(),
            "made_in": self.pid_at_first,
        }

    @register(Dispatch.ONE_TO_ALL)
    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    @register(Dispatch.ONE_TO_ALL)
    def fail_on(self, ranks: list[int]) -> int:
        if self.rank in ranks:
            raise KeyError(f"broken on {self.rank}")
        return self.rank

    @register(Dispatch.ONE_TO_ALL, retries=2)
    def third_time(self) -> int:
        self.tries += 1
        if self.tries < 3:
            raise ConnectionError("not yet")
        return self.tries

    @register(Dispatch.ONE_TO_ALL, retries=5)
    def refuse(self) -> None:
        from forebay.core.errors import InvalidInput

        self.tries += 1
        raise InvalidInput(f"refused, time {self.tries}")

    def tries_so_far(self) -> int:
        return self.tries

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def forever(self) -> None:
        self.calls.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            self.calls.append("cancelled")

    @register(Dispatch.ONE_TO_ALL, deadline_s=0.2)
    async def never(self) -> None:
        await asyncio.Event().wait()

    @register(Dispatch.ONE_TO_ALL, deadline_s=0.2, retries=1_000_000)
    def never_well(self) -> None:
        raise ConnectionError("not yet")

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO, retries=1)
    def exit_once(self, marker: str) -> str:
        if not Path(marker).exists():
            Path(marker).touch()
            os._exit(3)
        return "here again"

    @register(Dispatch.MAP, retries=1)
    def square_or_exit(self, number: int, marker: str) -> int:
        if number == 3 and not Path(marker).exists():
            Path(marker).touch()
            os._exit(3)
        return number * number

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    async def nap(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        self.calls.append("napped")
        return "napped"

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def sleep_in_turn(self, name: str) -> list[str]:
        time.sleep(0.02)
        self.calls.append(name)
        return self.calls

    @register(Dispatch.ONE_TO_ALL)
    def seen(self) -> list[str]:
        return self.calls

    @register(Dispatch.ONE_TO_ALL)
    def echo(self, value: Any) -> Any:
        return value

    @register(Dispatch.ONE_TO_ALL)
    def a_lock(self) -> Any:
        return threading.Lock()

    def unregistered(self, number: int) -> int:
        return self.number + number


class Picky(Worker):
    """Cannot be made on some ranks."""

    def __init__(self, *ranks: int) -> None:
        if self.rank in ranks:
            raise LookupError(f"no weights on {self.rank}")


class Judge(Worker):
    """Shares its process with a ``Member`` that is called ``actor``."""

    def __init__(self, bonus: int) -> None:
        self.bonus = bonus

    @register(Dispatch.ONE_TO_ALL)
    def foo(self, number: int) -> int:
        actor: Member = self.roles["actor"]
        return int(actor.foo(number)) + self.bonus

    @register(Dispatch.ONE_TO_ALL)
    def neighbours(self) -> tuple[int, list[str]]:
        return os.getpid(), sorted(self.roles)


class Distributed(Worker):
    """Uses what ``torch.distributed`` reads from the environment."""

    NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

    def __init__(self) -> None:
        self.at_first = os.environ["RANK"]

    @register(Dispatch.ONE_TO_ALL)
    def rank_at_first(self) -> str:
        return self.at_first

    @register(Dispatch.ONE_TO_ALL)
    def variables(self) -> dict[str, str]:
        return {name: os.environ[name] for name in self.NAMES}

    @register(Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self) -> int:
        import torch
        from torch import distributed

        distributed.init_process_group("gloo")
        total = torch.tensor(distributed.get_rank())
        distributed.all_reduce(total)
        distributed.destroy_process_group()
        return int(total)
