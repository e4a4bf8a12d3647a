"""``forebay start --replay``."""

from pathlib import Path

import pytest

from tests.cli.conftest import Forebay
from tests.kit import ServerProcess
from tests.replay.replay_kit import SIZE, write_group


def test_a_run_is_replayed_and_followed_to_its_end(
    forebay: Forebay, server: ServerProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cli-base").mkdir()  # a folder that is called as the run is
    recorded = server.start_run("idle", SIZE, name="cli-base")
    for number in (1, 2, 3):
        write_group(recorded, f"group {number}", [0.0, 1.0, 0.5, 0.25])
        recorded.take(num_groups=1, step=number)
    recorded.stop()
    given = ["--replay", "cli-base", "--steps", "2-3", "--name", "again", "--follow", "--url", server.url]
    outcome = forebay("start", *given)
    assert outcome.code == 0, outcome.err
    run_id = outcome.out.strip()
    assert f"it replays {recorded.run_id}" in outcome.err
    assert f"replayed {2 * SIZE} · {7 * 2 * SIZE} tokens not generated again" in " ".join(outcome.err.split())
    shown = " ".join(forebay("status", run_id, "--url", server.url).out.split())
    assert f"replays {recorded.run_id} (cli-base), recorded" in shown


def test_flags_of_a_replay_need_one(forebay: Forebay, server: ServerProcess) -> None:
    outcome = forebay("start", "--task-type", "idle", "--group-size", "2", "--steps", "3", "--url", server.url)
    assert outcome.code == 2
    assert "--steps needs --replay" in outcome.err


def test_a_source_without_samples_or_name_is_refused(forebay: Forebay, server: ServerProcess) -> None:
    server.start_run("idle", SIZE, name="never-filled").stop()
    outcome = forebay("start", "--replay", "never-filled", "--url", server.url)
    assert outcome.code == 1
    assert "no run named 'never-filled' has a sample" in outcome.err
    assert "near it" not in outcome.err
    outcome = forebay("start", "--replay", "", "--url", server.url)
    assert outcome.code == 2
    assert "--replay is empty" in outcome.err


def test_what_differs_is_said_in_words(forebay: Forebay, server: ServerProcess) -> None:
    recorded = server.start_run("idle", SIZE)
    write_group(recorded, "group", [0.0, 1.0, 0.5, 0.25])
    recorded.stop()
    given = ["--replay", recorded.run_id, "--group-size", "2", "--url", server.url]
    refused = forebay("start", *given)
    assert refused.code == 1
    assert "group_size was 4, now 2" in refused.err
    assert "--ignore group_size" in refused.err
    accepted = forebay("start", *given, "--ignore", "group_size")
    assert accepted.code == 0, accepted.err
