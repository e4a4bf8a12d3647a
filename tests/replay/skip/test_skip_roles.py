"""Roles: in which order one is asked, one of a user's own, and which classes are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from forebay.core.errors import InvalidInput
from forebay.replay.skip import BaseSkip, RolloutSkip, SkipAction, SkipConfig, SkipManager, register_skip
from forebay.replay.skip.base import SKIP_REGISTRY
from tests.replay.skip.skip_kit import Prompts


def test_a_role_is_asked_in_this_order() -> None:
    asked: list[str] = []

    @register_skip("spied")
    class Spy(BaseSkip):
        answer: ClassVar[bool] = False

        def is_enabled(self) -> bool:
            asked.append("is_enabled")
            return super().is_enabled()

        def meet_precondition(self, step: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
            asked.append(f"meet_precondition {step} {args} {kwargs}")
            return self.answer

        def warp_function(self, step: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            asked.append(f"warp_function {step} {func.__name__} {args} {kwargs}")
            return "loaded"

        def prepare_data(self, step: int, result: Any, *args: Any, **kwargs: Any) -> None:
            asked.append(f"prepare_data {step} {result} {args} {kwargs}")

    @SkipManager.annotate(role="spied")
    def work(*args: Any, **kwargs: Any) -> str:
        asked.append("work")
        return "made"

    def calls(step: int, *args: Any) -> list[str]:
        asked.clear()
        SkipManager.set_step(step)
        work(*args, key=1)
        return list(asked)

    assert calls(1) == ["work"]
    SkipManager.init({"skip": {"spied": {"steps": [1]}}})
    assert calls(1) == ["is_enabled", "work"]
    SkipManager.init({"skip": {"spied": {"enable": True, "steps": [1]}}})
    assert calls(2) == ["is_enabled", "work"]
    arguments = "('a',) {'key': 1}"
    missed = ["is_enabled", f"meet_precondition 1 {arguments}", "work", f"prepare_data 1 made {arguments}"]
    assert calls(1, "a") == missed
    Spy.answer = True
    hit = ["is_enabled", f"meet_precondition 1 {arguments}", f"warp_function 1 work {arguments}"]
    assert calls(1, "a") == hit
    assert calls(1, Prompts(validate=True)) == ["work"]


def test_a_role_of_ones_own_needs_four_steps(tmp_path: Path) -> None:
    class ScoreConfig(SkipConfig):
        pass

    kept: dict[int, Any] = {}

    @register_skip("score")
    class ScoreSkip(BaseSkip):
        support_actions = (SkipAction.EMPTY, SkipAction.CACHE)
        support_online_step = True
        config_class = ScoreConfig

        def extract_step(self, *args: Any, **kwargs: Any) -> int:
            return int(args[0])

        def meet_precondition(self, step: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
            return self.action == SkipAction.EMPTY or step in kept

        def warp_function(self, step: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return kept.get(step, [])

        def prepare_data(self, step: int, result: Any, *args: Any, **kwargs: Any) -> None:
            kept[step] = result

    @SkipManager.annotate(role="score")
    def score(batch: int) -> list[int]:
        return [batch, len(kept)]

    SkipManager.init({"skip": {"score": {"enable": True, "steps": [7]}}})
    assert [score(7), score(7), score(8), score(8)] == [[7, 0], [7, 0], [8, 1], [8, 1]]
    SkipManager.init({"skip": {"score": {"enable": True, "steps": [9], "action": "empty"}}})
    assert (score(9), score(7)) == ([], [7, 1])
    with pytest.raises(InvalidInput) as caught:
        SkipManager.init({"skip": {"score": {"stepz": [7]}}})
    assert caught.value.field == "skip.score.stepz"


def test_online_without_extract_step_is_refused_at_registration() -> None:
    class Online(BaseSkip):
        support_online_step = True

    with pytest.raises(InvalidInput, match="lacks extract_step"):
        register_skip("online")(Online)
    assert "online" not in SKIP_REGISTRY


def test_a_second_class_for_a_role_is_refused() -> None:
    class Second(RolloutSkip):
        pass

    with pytest.raises(InvalidInput, match="already has the class RolloutSkip"):
        register_skip("rollout")(Second)
    assert SKIP_REGISTRY["rollout"] is RolloutSkip
    assert register_skip("rollout")(RolloutSkip) is RolloutSkip


@pytest.mark.parametrize("role", ["", "a b", 3, None])
def test_a_role_has_a_name(role: Any) -> None:
    with pytest.raises(InvalidInput):
        register_skip(role)


def test_only_classes_of_roles_are_registered() -> None:
    with pytest.raises(InvalidInput, match="BaseSkip"):
        register_skip("third")(dict)  # type: ignore[type-var]
