"""The backends on which the contract of worker groups is held."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forebay.workers.groups import ClassWithInitArgs, ResourcePool, WorkerGroup
from tests.ray_kit import join_cluster
from tests.worker_groups_kit import Member

BACKENDS = ["inline", "processes", pytest.param("ray", marks=pytest.mark.ray)]


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        join_cluster()
    return str(request.param)


@pytest.fixture
def make_group(backend: str) -> Iterator[Callable[..., WorkerGroup]]:
    made: list[WorkerGroup] = []

    def make(pool: Any = 1, cls_with_init: Any = None, **options: Any) -> WorkerGroup:
        pool = ResourcePool([pool], cpus=0.1) if isinstance(pool, int) else pool
        group = WorkerGroup(pool, cls_with_init or ClassWithInitArgs(Member), backend=backend, **options)
        made.append(group)
        return group

    yield make
    for group in made:
        group.close(drain_s=0.0)
