"""A rollout that is asked for again, by the same process or by the next one."""

import sys
from typing import Any

import pytest

from forebay.client import slime
from tests.client.slime.kit import generate, group, instances
from tests.kit import NativeRun


@pytest.mark.parametrize(
    ("start_rollout_id", "expected"), [(0, ["g0", "g1"]), (1, ["g2", "g3"]), (3, ["g6", "g7"]), (9, ["g6", "g7"])]
)
def test_a_new_process_goes_on_behind_the_model_that_it_has(
    run: NativeRun, args: Any, start_rollout_id: int, expected: list[str]
) -> None:
    for number in range(10):
        run.write(*group(f"g{number}"))
    for rollout_id in range(3):
        generate(args, rollout_id)
    slime.close()
    assert instances(generate(args, start_rollout_id)) == expected


def test_a_rollout_that_is_asked_for_again_is_the_same(run: NativeRun, args: Any) -> None:
    for number in range(4):
        run.write(*group(f"g{number}"))
    first = generate(args, 0)
    assert generate(args, 1) != first
    assert generate(args, 0) == first


def test_a_rollout_that_failed_on_the_way_has_taken_nothing(
    run: NativeRun, args: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        run.write(*group(f"g{number}"))
    generate(args, 0)
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "slime.utils.types")
        with pytest.raises(ModuleNotFoundError):
            generate(args, 1)
    assert run.view()["groups"]["ready"] == 2
    assert instances(generate(args, 1)) == ["g2", "g3"]
