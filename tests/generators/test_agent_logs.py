"""What agents printed, in files of a run's folder: bounded, by rollout, and found by the uid of any of its samples."""

from pathlib import Path

import pytest

from forebay.generators.process.run_logs import RUN_DIR_VARIABLE, AgentLogs, read_agent_log


def names(folder: Path) -> list[str]:
    return sorted(path.stem for path in (folder / "agents").iterdir())


def test_the_oldest_go_where_they_are_too_many_those_of_an_earlier_process_too(tmp_path: Path) -> None:
    AgentLogs(tmp_path, 100).keep("a", "x" * 40)
    logs = AgentLogs(tmp_path, 100)
    logs.keep("b", "x" * 40)
    assert names(tmp_path) == ["a", "b"]
    logs.keep("c", "x" * 40)
    assert names(tmp_path) == ["b", "c"]
    logs.keep("b", "again" * 6)  # by another attempt
    assert (names(tmp_path), read_agent_log([tmp_path], "b")) == (["b", "c"], "again" * 6)


def test_the_newest_start_counts_and_a_fork_has_what_its_rollout_printed(tmp_path: Path) -> None:
    first, second = tmp_path / "start-1", tmp_path / "start-2"
    for folder in (first, second):
        folder.mkdir()
        AgentLogs(folder).keep("run-f1-ab-0002", f"of {folder.name}")
    AgentLogs(first).keep("run-f1-cd-0001", "only then")
    starts = [second, first]
    assert read_agent_log(starts, "run-f1-ab-0002") == "of start-2"
    assert read_agent_log(starts, "run-f1-ab-0002-f1-9c") == "of start-2"
    assert read_agent_log(starts, "run-f1-cd-0001") == "only then"
    assert read_agent_log(starts, "run-f1") is None
    assert read_agent_log(starts, f"../{first.name}/agents/run-f1-ab-0002") is None


def test_a_generator_that_is_run_by_hand_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(RUN_DIR_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    AgentLogs.of_this_run().keep("a", "printed")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_costs_no_rollout(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    AgentLogs(tmp_path / "gone").keep("a", "printed")
    assert "could not store the output of agent a" in caplog.text
