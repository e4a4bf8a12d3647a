"""What lies under ``skip``: three forms, defaults, what is refused, and where dumps lie by it."""

import copy
import logging
import subprocess
import sys
import warnings
from dataclasses import fields, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
from omegaconf import OmegaConf

from forebay.core.errors import InvalidInput
from forebay.replay.skip import (
    AsyncRolloutSkipConfig,
    BaseSkip,
    RolloutSkip,
    RolloutSkipConfig,
    SkipAction,
    SkipManager,
    register_skip,
)
from tests.replay.skip.skip_kit import TRAINER, Rollouts, config, folder


def as_object(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return SimpleNamespace(**{name: as_object(each) for name, each in value.items()})


def as_dataclass(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    made = make_dataclass("Part", value)
    return made(**{name: as_dataclass(each) for name, each in value.items()})


@pytest.mark.parametrize("form", [dict, as_object, as_dataclass, OmegaConf.create])
def test_every_form_of_a_configuration_gives_the_same(form: Any, tmp_path: Path) -> None:
    given = config(tmp_path, action="repeat", _target_="some.Class")
    given["skip"]["_target_"] = "some.Class"
    SkipManager.init(form(given))
    skip = SkipManager.skip_instances["rollout"]
    assert isinstance(skip, RolloutSkip)
    expected = RolloutSkipConfig(enable=True, dump_dir=str(tmp_path), steps=[1, 2, 3], action="repeat")
    assert (skip.local_config, skip.dumps.path) == (expected, folder(tmp_path))
    assert (skip.is_enabled(), skip.steps, skip.action) == (True, [1, 2, 3], SkipAction.REPEAT)
    assert SkipManager.config is not None
    assert SkipManager.config.rollout is skip.local_config
    assert copy.copy(SkipManager.config).rollout is skip.local_config
    with pytest.raises(AttributeError, match="async_rollout"):
        _ = SkipManager.config.async_rollout


def test_defaults() -> None:
    SkipManager.init({"skip": {"rollout": {}, "async_rollout": None}})
    for skip in SkipManager.skip_instances.values():
        made = skip.local_config
        assert (made.enable, made.dump_dir, made.steps, made.action) == (False, "~/.forebay/rollout_dump", [], "cache")
    assert sorted(SkipManager.skip_instances) == ["async_rollout", "rollout"]


def test_steps_may_be_integers_of_numpy(tmp_path: Path) -> None:
    for steps in ([numpy.int64(1), 2], numpy.arange(1, 3), range(1, 3)):
        SkipManager.init(config(tmp_path, steps=steps))
        assert SkipManager.skip_instances["rollout"].steps == [1, 2]


def test_both_roles_have_the_same_fields() -> None:
    for kind in (RolloutSkipConfig, AsyncRolloutSkipConfig):
        assert [each.name for each in fields(kind)] == ["enable", "dump_dir", "steps", "action", "on_mismatch"]


@pytest.mark.parametrize("given", [None, {}, {"skip": None}, {"skip": {}}, SimpleNamespace(), OmegaConf.create({})])
def test_without_skip_nothing_is_enabled(given: Any) -> None:
    SkipManager.init(given)
    assert SkipManager.skip_instances == {}


def test_home_is_expanded_and_the_path_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    SkipManager.init(config(Path("~/a/../dumps")))
    Rollouts().at(1)
    assert (folder(tmp_path / "dumps") / "1" / "meta.json").is_file()


REFUSED = [
    ({"steps": [1, True]}, "skip.rollout.steps[1]"),
    ({"steps": ["x"]}, "skip.rollout.steps[0]"),
    ({"steps": [1.0]}, "skip.rollout.steps[0]"),
    ({"steps": [-1]}, "skip.rollout.steps[0]"),
    ({"steps": 3}, "skip.rollout.steps"),
    ({"steps": "123"}, "skip.rollout.steps"),
    ({"steps": None}, "skip.rollout.steps"),
    ({"enable": "yes"}, "skip.rollout.enable"),
    ({"dump_dir": 3}, "skip.rollout.dump_dir"),
    ({"dump_dir": ""}, "skip.rollout.dump_dir"),
    ({"on_mismatch": "stop"}, "skip.rollout.on_mismatch"),
    ({"on_mismatch": "run", "action": "repeat"}, "skip.rollout.on_mismatch"),
    ({"steps": [numpy.bool_(True)]}, "skip.rollout.steps[0]"),
    ({"action": "cash"}, "skip.rollout.action"),
    ({"action": "random"}, "skip.rollout.action"),
    ({"action": "empty"}, "skip.rollout.action"),
    ({"acton": "cache"}, "skip.rollout.acton"),
]


@pytest.mark.parametrize(("wrong", "place"), REFUSED)
def test_what_is_wrong_is_refused_by_its_field(wrong: dict[str, Any], place: str, tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path))
    before = SkipManager.skip_instances
    with pytest.raises(InvalidInput, match=r"skip\.rollout") as caught:
        SkipManager.init(config(tmp_path, **wrong))
    assert caught.value.field == place
    assert isinstance(caught.value, ValueError)
    assert SkipManager.skip_instances is before


def test_checks_are_no_assertions(tmp_path: Path) -> None:
    code = (
        "from forebay.replay.skip import SkipManager\n"
        "try: SkipManager.init({'skip': {'rollout': {'steps': [True]}}})\n"
        "except ValueError as error: print(error.field)"
    )
    told = subprocess.run([sys.executable, "-O", "-P", "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout == "skip.rollout.steps[0]\n"


def test_a_class_refuses_actions_that_it_does_not_support() -> None:
    @register_skip("third")
    class Third(BaseSkip):
        support_actions = (SkipAction.EMPTY,)

    with pytest.raises(ValueError, match=r"^Unsupported action .*random") as caught:
        SkipManager.init({"skip": {"third": {"action": "random"}}})
    assert getattr(caught.value, "field", None) == "action"
    SkipManager.init({"skip": {"third": {"action": "empty"}}})
    assert {str(action) for action in SkipAction} == {"cache", "repeat", "random", "empty"}


@pytest.mark.parametrize("role", ["rolout", "other"])
def test_a_role_that_nobody_registered_is_refused(role: str) -> None:
    with pytest.raises(InvalidInput, match="nothing is registered") as caught:
        SkipManager.init({"skip": {role: {}}})
    assert caught.value.field == f"skip.{role}"


def test_verls_defaults_are_taken_and_its_queue_is_not_skipped() -> None:
    off = {"enable": False, "dump_dir": "~/.verl/rollout_dump", "steps": [], "action": "cache"}
    SkipManager.init({"skip": {"rollout": off, "async_rollout": off, "rollout_tq": off}})
    assert sorted(SkipManager.skip_instances) == ["async_rollout", "rollout"]
    with pytest.raises(InvalidInput) as caught:
        SkipManager.init({"skip": {"rollout_tq": {**off, "enable": True}}})
    assert "replayed as a run" in caught.value.hint


def test_a_registered_role_without_configuration_is_absent(tmp_path: Path) -> None:
    SkipManager.init(config(tmp_path))
    assert list(SkipManager.skip_instances) == ["rollout"]


def test_long_lists_of_steps_come_from_the_command_line(tmp_path: Path) -> None:
    steps = ",".join(map(str, range(1, 129)))
    SkipManager.init(OmegaConf.from_dotlist(["skip.async_rollout.enable=True", f"skip.async_rollout.steps=[{steps}]"]))
    assert SkipManager.skip_instances["async_rollout"].steps == list(range(1, 129))


def without(dotted: str) -> dict[str, Any]:
    trainer = copy.deepcopy(TRAINER)
    place: Any = trainer
    *parts, last = dotted.split(".")
    for part in parts:
        place = place[part]
    del place[last]
    return trainer


@pytest.mark.parametrize(
    ("missing", "place"),
    [
        ("trainer.experiment_name", "default_experiment_name_proj/GBS4_N2_in16_out32"),
        ("trainer.project_name", "exp_default_project_name/GBS4_N2_in16_out32"),
        ("trainer", "default_experiment_name_default_project_name/GBS4_N2_in16_out32"),
        ("data.gen_batch_size", "exp_proj/GBS0_N2_in16_out32"),
        ("data.max_prompt_length", "exp_proj/GBS4_N2_in0_out32"),
        ("data.max_response_length", "exp_proj/GBS4_N2_in16_out0"),
        ("data", "exp_proj/GBS0_N2_in0_out0"),
        ("actor_rollout_ref.rollout.n", "exp_proj/GBS4_N0_in16_out32"),
        ("actor_rollout_ref", "exp_proj/GBS4_N0_in16_out32"),
    ],
)
def test_names_and_sizes_that_are_missing_have_verls_defaults(missing: str, place: str, tmp_path: Path) -> None:
    SkipManager.init({**without(missing), "skip": config(tmp_path)["skip"]})
    Rollouts().at(2)
    assert sorted(path.name for path in (tmp_path / place / "2").iterdir()) == ["gen_batch.json", "meta.json"]


@pytest.mark.parametrize("value", [None, 8])
def test_the_batch_size_is_that_of_generation_else_of_training(value: int | None, tmp_path: Path) -> None:
    trainer = copy.deepcopy(TRAINER)
    trainer["data"] |= {"gen_batch_size": value, "train_batch_size": 6}
    SkipManager.init({**trainer, "skip": config(tmp_path)["skip"]})
    Rollouts().at(2)
    assert (tmp_path / "exp_proj" / f"GBS{value or 6}_N2_in16_out32" / "2" / "meta.json").is_file()


def test_dumps_of_other_sizes_are_not_seen(tmp_path: Path) -> None:
    rollouts = Rollouts()
    SkipManager.init(config(tmp_path, action="repeat"))
    rollouts.at(1)
    for part, name in [("data", "max_response_length"), ("data", "gen_batch_size"), ("trainer", "experiment_name")]:
        changed = {**config(tmp_path, action="repeat")}
        changed[part] = {**TRAINER[part], name: 5}
        SkipManager.init(changed)
        assert rollouts.at(1)["call"] == len(rollouts.calls)
    assert len(rollouts.calls) == 4


def test_names_with_slashes_lead_nowhere_else(tmp_path: Path) -> None:
    trainer = {"trainer": {"experiment_name": "../../me/a", "project_name": ".."}}
    SkipManager.init({**TRAINER, **trainer, "skip": config(tmp_path / "dumps")["skip"]})
    Rollouts().at(1)
    assert [path.name for path in (tmp_path / "dumps").iterdir()] == [".._.._me_a_.."]
    assert [path.name for path in tmp_path.iterdir()] == ["dumps"]


def test_a_size_that_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidInput, match="max_prompt_length") as caught:
        SkipManager.init({"data": {"max_prompt_length": "long"}, "skip": {"rollout": {}}})
    assert caught.value.field == "data.max_prompt_length"


@pytest.mark.parametrize("form", [dict, as_object, OmegaConf.create])
def test_verls_older_flag_is_turned_off_beside_the_new_one(form: Any, tmp_path: Path) -> None:
    both = {**config(tmp_path), "actor_rollout_ref": {"rollout": {"n": 2, "skip": {"enable": True}}}}
    given = form(copy.deepcopy(both))
    with pytest.warns(DeprecationWarning, match=r"actor_rollout_ref\.rollout\.skip\.enable") as caught:
        SkipManager.init(given)
    assert caught[0].filename == __file__
    ref = given["actor_rollout_ref"] if isinstance(given, dict) else given.actor_rollout_ref
    rollout = ref["rollout"] if isinstance(ref, dict) else ref.rollout
    legacy = rollout["skip"] if isinstance(rollout, dict) else rollout.skip
    assert (legacy["enable"] if isinstance(legacy, dict) else legacy.enable) is False
    assert SkipManager.skip_instances["rollout"].is_enabled()


def test_the_older_flag_alone_stays_as_it_is(tmp_path: Path) -> None:
    given: dict[str, Any] = {"actor_rollout_ref": {"rollout": {"skip": {"enable": True}}}}
    for skip in ({}, config(tmp_path, enable=False)["skip"], config(tmp_path, "async_rollout")["skip"]):
        with pytest.warns(DeprecationWarning, match=r"skip\.rollout\.enable instead"):
            SkipManager.init({**given, "skip": skip})
        assert given["actor_rollout_ref"]["rollout"]["skip"]["enable"] is True


def test_without_the_older_flag_nothing_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SkipManager.init({**config(tmp_path), "actor_rollout_ref": {"rollout": {"skip": {"enable": False}}}})
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
