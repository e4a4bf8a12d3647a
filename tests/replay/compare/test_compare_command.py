"""``forebay compare`` of files: what is as it was, and what would change."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from forebay.core.group import GroupState
from forebay.core.ids import group_id
from forebay.core.records.recording_rows import FileRow
from forebay.core.records.rows import GroupRow
from tests.buffer.buffer_kit import file_hooks
from tests.cli.conftest import Forebay, forebay
from tests.replay.compare.compare_kit import HOOKS, TIMEOUT_S, record_by_chance, record_every_verdict, record_groups
from tests.replay.recordings.recording_kit import damage_body, rewrite

__all__ = ["forebay"]

PNG = b"\x89PNG"
FILTER = f"""{HOOKS}
def filter_item(item, task_type):
    return item["reward"] < 0.75
"""
FAILING = f"""{HOOKS}
def normalize_group_data(group):
    assert all(item["reward"] < 1 for item in group[1])
    return group
"""
JUDGE = """
import os
os.write(1, b"of a descriptor")
print("of a module")
def halved(item):
    print("of a function")
    assert item["messages"][-1]["role"] == "assistant" and item["finish_reason"] == "stop"
    if item["instance_id"] == "row-2":
        raise KeyError("no label")
    return 0.25 if item["instance_id"] == "row-1" else item["quality"] / 2
async def halved_slowly(item):
    return halved(item)
"""
VERDICTS = {
    "plain": "delivered",
    "invalid": "discarded: invalid",
    "failed": "discarded: failed",
    "filtered": "discarded: filtered",
    "timed out": "discarded: timed_out",
    "late": "discarded: timed_out",
    "salvaged": "delivered: salvaged",
    "no reader": "delivered",
    "open": "open",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A recording with a group of every verdict."""
    asyncio.run(record_every_verdict(tmp_path / "run.fbr"))
    return tmp_path / "run.fbr"


def compared(forebay: Forebay, *arguments: object) -> dict[str, Any]:
    outcome = forebay("compare", *arguments, "--json")
    assert outcome.code == 0, outcome.err
    document: dict[str, Any] = json.loads(outcome.out)
    return document


def text(verdict: dict[str, str]) -> str:
    return ": ".join(filter(None, (verdict["state"], verdict["reason"])))


def changed_verdicts(document: dict[str, Any]) -> dict[object, tuple[str, str]]:
    pairs = {each["instance_id"]: (text(each["before"]), text(each["after"])) for each in document["groups"]}
    return {instance: pair for instance, pair in pairs.items() if pair[0] != pair[1]}


def test_with_nothing_changed_every_group_is_as_recorded(forebay: Forebay, file: Path) -> None:
    document = compared(forebay, file)
    check = document["self_check"]
    assert (check["num_groups"], check["num_as_recorded"], check["num_undecided"]) == (9, 8, 1)
    assert (check["mismatches"], document["after"], document["moves"], document["groups"]) == ([], None, None, [])
    expected: dict[str, int] = {}
    for verdict in VERDICTS.values():
        expected[verdict] = expected.get(verdict, 0) + 1
    assert document["before"]["verdicts"] == expected
    shown = forebay("compare", file)
    assert shown.code == 0
    assert "8 of 8 groups have their recorded verdict; 1 more had none yet" in shown.out
    assert "as changed" not in shown.out


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happened_to_a_run_its_groups_are_as_recorded(forebay: Forebay, tmp_path: Path, seed: int) -> None:
    groups = asyncio.run(record_by_chance(tmp_path / "run.fbr", seed))
    check = compared(forebay, tmp_path / "run.fbr")["self_check"]
    assert check["mismatches"] == []
    assert check["num_as_recorded"] + check["num_undecided"] == check["num_groups"] == len(groups)
    assert check["num_undecided"] <= sum(group.state in ("open", "ready") for group in groups)


def test_a_planted_filter_takes_exactly_its_groups(forebay: Forebay, tmp_path: Path) -> None:
    good, bad = [0.0, 0.5, 0.0, 0.5], [0.0, 1.0, 1.0, 1.0]
    groups = asyncio.run(record_groups(tmp_path / "run.fbr", [good, bad, good, good, bad]))
    (tmp_path / "planted_generator.py").write_text(FILTER)
    document = compared(forebay, tmp_path / "run.fbr", "--code", tmp_path / "planted_generator.py")
    assert document["self_check"]["num_as_recorded"] == 5
    change = ("delivered", "discarded: filtered")
    assert changed_verdicts(document) == {"row-1": change, "row-4": change}
    assert [each["group_id"] for each in document["groups"]] == [groups[1].group_id, groups[4].group_id]
    assert "1 of 4 items were kept" in document["groups"][0]["detail"]
    shown = forebay("compare", tmp_path / "run.fbr", "--code", tmp_path / "planted_generator.py").out
    assert "2 groups change: 2 delivered → discarded: filtered" in shown
    assert "filter_item of" in shown


def test_what_the_recorded_file_decided_is_found_with_that_file_and_known_without_it(
    forebay: Forebay, tmp_path: Path
) -> None:
    path, other = tmp_path / "its_generator.py", tmp_path / "other" / "its_generator.py"
    path.write_text(FILTER)
    other.parent.mkdir()
    other.write_text(FILTER.replace("0.75", "0.4"))
    digest = json.loads(forebay("generators", "check", path, "--json").out)["sha256"]
    rewards = [[0.0, 0.3, 0.0, 0.3], [0.0, 0.5, 0.5, 0.5], [0.0, 1.0, 1.0, 1.0]]
    run = {"generator_hooks": ["filter_item"], "generator_sha256": digest}
    asyncio.run(record_groups(tmp_path / "run.fbr", rewards, file_hooks(path), **run))

    as_then = compared(forebay, tmp_path / "run.fbr", "--code", path)
    assert as_then["self_check"]["has_code"]
    assert (as_then["self_check"]["num_as_recorded"], as_then["after"]) == (3, None)

    changed = compared(forebay, tmp_path / "run.fbr", "--code", other)
    assert not changed["self_check"]["has_code"]
    assert changed_verdicts(changed) == {"row-1": ("delivered", "discarded: filtered")}

    without = compared(forebay, tmp_path / "run.fbr")
    assert [each["instance_id"] for each in without["self_check"]["mismatches"]] == ["row-2"]
    shown = forebay("compare", tmp_path / "run.fbr").out
    assert "does not have the hooks of its generator" in shown
    assert "--code" in shown


def test_other_settings_change_what_they_decide(forebay: Forebay, file: Path) -> None:
    salvaged = changed_verdicts(compared(forebay, file, "--set", "min_timeout_group_size_ratio=0.5"))
    change = ("discarded: timed_out", "delivered: salvaged")
    assert salvaged == {"timed out": change, "late": change}
    in_time = changed_verdicts(compared(forebay, file, "--set", f"group_timeout_seconds={3 * TIMEOUT_S}"))
    assert in_time == {"late": ("discarded: timed_out", "delivered")}
    kept = changed_verdicts(compared(forebay, file, "--set", "reward_range=[0,3]"))
    assert kept == {"filtered": ("discarded: filtered", "delivered")}
    everything = changed_verdicts(compared(forebay, file, "--set", "contract=B"))
    assert everything == {
        "invalid": ("discarded: invalid", "delivered"),
        "filtered": ("discarded: filtered", "delivered"),
        "salvaged": ("delivered: salvaged", "discarded: incomplete"),
    }


def test_it_says_how_advantages_move(forebay: Forebay, tmp_path: Path) -> None:
    rewards: list[list[float | None]] = [[0.0, 0.5, 1.0, 0.5], [1.0, 0.0, 0.0, 0.0]]
    asyncio.run(record_groups(tmp_path / "run.fbr", rewards))
    document = compared(forebay, tmp_path / "run.fbr", "--set", "normaliser=dr_grpo")
    assert changed_verdicts(document) == {}
    moves = document["moves"]
    assert (moves["rewards"]["num_both"], moves["rewards"]["num_moved"]) == (8, 0)
    # With grpo they are divided by the deviation: 0.354 in the first group, 0.433 in the second.
    assert (moves["advantages"]["num_both"], moves["advantages"]["num_moved"]) == (8, 6)
    assert moves["advantages"]["largest"] == pytest.approx(0.75 / 0.4330127 - 0.75)
    assert [each["largest_advantage_change"] for each in document["groups"]] == pytest.approx(
        [0.5 / 0.3535534 - 0.5, 0.75 / 0.4330127 - 0.75]
    )
    fewer = compared(forebay, tmp_path / "run.fbr", "--set", "group_size=2")
    assert fewer["after"]["verdicts"] == {"delivered": 2}
    assert fewer["moves"]["advantages"]["num_both"] == 4


def test_another_reward_function_is_asked_and_what_it_cannot_judge_has_failed(forebay: Forebay, tmp_path: Path) -> None:
    rewards: list[list[float | None]] = [[0.0, 1.0, 1.0, None], [0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]]
    asyncio.run(record_groups(tmp_path / "run.fbr", rewards))
    (tmp_path / "judge.py").write_text(JUDGE)
    for name in ("halved", "halved_slowly"):
        document = compared(forebay, tmp_path / "run.fbr", "--reward", f"{tmp_path / 'judge.py'}:{name}")
        assert (document["moves"]["rewards"]["num_both"], document["moves"]["rewards"]["num_moved"]) == (7, 6)
        assert document["moves"]["rewards"]["mean_before"] == pytest.approx(7 / 11)
        invalid, failed = ("delivered", "discarded: invalid"), ("delivered", "discarded: failed")
        assert changed_verdicts(document) == {"row-1": invalid, "row-2": failed}
        assert document["moves"]["advantages"]["num_both"] == 3
    asked = document["facts"]["rewards"]
    assert (
        "11 rollouts were judged again, 1 had failed before; 4 have none now, and count as failed: 4 KeyError" in asked
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("judge.py", "is not FILE:NAME"),
        ("nowhere.py:halved", "there is no file"),
        ("judge.py:halfed", "did you mean halved?"),
        ("broken.py:halved", "broken.py, line 2 cannot be imported: RuntimeError: no key"),
        ("json.py:loads", "hides Python's own module"),
    ],
)
def test_a_reward_function_that_cannot_be_had_is_refused(
    forebay: Forebay, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, message: str
) -> None:
    for name, source in (("judge.py", JUDGE), ("broken.py", "\nraise RuntimeError('no key')"), ("json.py", "")):
        (tmp_path / name).write_text(source)
    monkeypatch.chdir(tmp_path)
    refused = forebay("compare", file, "--reward", given)
    assert (refused.code, refused.out) == (2, "")
    assert message in refused.err


def test_a_hook_that_raises_costs_its_groups_and_shows_its_traceback(forebay: Forebay, tmp_path: Path) -> None:
    asyncio.run(record_groups(tmp_path / "run.fbr", [[0.0, 0.5, 0.0, 0.5], [0.0, 1.0, 0.0, 0.5]]))
    (tmp_path / "failing_generator.py").write_text(FAILING)
    document = compared(forebay, tmp_path / "run.fbr", "--code", tmp_path / "failing_generator.py")
    assert changed_verdicts(document) == {"row-1": ("delivered", "discarded: hook_failed")}
    shown = forebay("compare", tmp_path / "run.fbr", "--code", tmp_path / "failing_generator.py").out
    assert "AssertionError" in shown


def test_only_the_groups_of_some_steps(forebay: Forebay, tmp_path: Path) -> None:
    asyncio.run(record_groups(tmp_path / "run.fbr", [[0.0, 1.0, 0.0, 1.0]] * 6, step_of=2))
    assert compared(forebay, tmp_path / "run.fbr", "--steps", "1-2")["self_check"]["num_groups"] == 4
    refused = forebay("compare", tmp_path / "run.fbr", "--steps", "7")
    assert (refused.code, "step 7 is not recorded" in refused.err) == (2, True)


def test_what_is_damaged_is_named_and_everything_else_is_compared(forebay: Forebay, file: Path) -> None:
    group = group_id("plain", 0)
    damage_body(file, group)
    document = compared(forebay, file)
    assert [each["instance_id"] for each in document["damaged"]] == ["plain"]
    assert (document["self_check"]["num_groups"], document["self_check"]["mismatches"]) == (8, [])
    shown = forebay("compare", file).out
    assert f"group {group} ('plain', epoch 0) is left out: " in shown


def test_a_group_that_was_ready_and_is_not_now_is_no_group_without_a_verdict(forebay: Forebay, file: Path) -> None:
    """``is_valid_group`` had been asked about it: that it says something else now must not be hidden."""

    def as_ready(row: FileRow, body: bytes) -> tuple[FileRow, bytes]:
        is_invalid = isinstance(row, GroupRow) and row.reason == "invalid"
        return replace(row, state=GroupState.READY, reason="") if is_invalid else row, body

    rewrite(file, as_ready)
    check = compared(forebay, file)["self_check"]
    assert [(each["instance_id"], each["found"]["reason"]) for each in check["mismatches"]] == [("invalid", "invalid")]
    assert check["num_undecided"] == 1


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_it_draws(forebay: Forebay, file: Path, tmp_path: Path, ending: str) -> None:
    plot = tmp_path / f"moved{ending}"
    outcome = forebay("compare", file, "--set", "normaliser=rloo", "--plot", plot)
    assert (outcome.code, outcome.err) == (0, f"wrote {plot}\n")
    assert plot.read_bytes().startswith(PNG if ending == ".png" else b"<?xml")
    # With nothing changed, and nothing that goes out, there is a picture as well.
    assert forebay("compare", file, "--plot", plot).code == 0


def test_without_matplotlib_it_says_how_to_install_it(
    forebay: Forebay, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.core.lazy_names.find_spec", lambda _: None)
    outcome = forebay("compare", file, "--plot", tmp_path / "x.png")
    assert outcome.code == 1
    assert "forebay[sim]" in outcome.err
    assert forebay("compare", file).code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "normalizer=rloo"], "did you mean normaliser?"),
        (["--set", "normaliser=best"], "normaliser: "),
        (["--set", "scheduler=null"], "has no effect on how a recording is judged"),
        (["--set", "normaliser"], "is not NAME=JSON"),
        (["--code", "nowhere.py"], "--code nowhere.py does not exist"),
        (["--plot", "picture.gif"], "is not an image file"),
        (["--steps", "x"], "'x' is neither a step nor a range of steps"),
    ],
)
def test_what_makes_no_sense_is_refused(forebay: Forebay, file: Path, arguments: list[str], message: str) -> None:
    refused = forebay("compare", file, *arguments)
    assert (refused.code, refused.out) == (2, "")
    assert message in refused.err


def test_code_that_cannot_be_loaded_is_refused_in_the_words_of_the_check(
    forebay: Forebay, file: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken_generator.py"
    broken.write_text("import no_such_module\n")
    refused = forebay("compare", file, "--code", broken)
    assert refused.code == 2
    error = json.loads(forebay("generators", "check", broken, "--json").out)["error"]
    assert error in refused.err
    assert "generators check" in refused.err


def test_a_source_that_is_none_is_refused(forebay: Forebay, tmp_path: Path) -> None:
    (tmp_path / "notes.fbr").write_text("no recording")
    assert "is not a recording" in forebay("compare", tmp_path / "notes.fbr").err
    missing = forebay("compare", tmp_path / "missing.fbr")
    assert (missing.code, "there is no recording" in missing.err) == (1, True)
