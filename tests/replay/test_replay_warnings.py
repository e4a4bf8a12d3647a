"""What the reply to the start of a replay warns of: groups that it leaves out, weight versions, changed code."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from forebay.engines.scripted import ScriptedCall
from tests.cli.conftest import Forebay, forebay
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, write_generator
from tests.replay.modes_kit import GROUP_SIZE, Answers, finished, scripted, start, write_rows, write_words
from tests.replay.replay_kit import HOOKED, SIZE, write_group

__all__ = ["forebay"]


def warnings_of(server: ServerProcess, replay: Any, **payload: Any) -> list[str]:
    """Those in the reply to the start."""
    reply = server.client.post("/v1/runs", json={"replay": replay, **payload})
    assert reply.status_code == 201, reply.text
    warnings: list[str] = reply.json()["warnings"]
    return warnings


@pytest.fixture
def words_server(make_server: MakeServer, tmp_path: Path) -> ServerProcess:
    write_words(tmp_path / "tasks")
    return make_server(generators=tmp_path / "tasks", start_wait_s=60)


def test_a_run_that_still_runs_is_replayed_with_the_count_of_groups_left_out(
    words_server: ServerProcess, forebay: Forebay, tmp_path: Path
) -> None:
    answers, rest = Answers(), threading.Event()

    async def answer(call: ScriptedCall) -> str:
        if call.messages[-1]["content"] not in ("a", "b"):
            await asyncio.to_thread(rest.wait, 60)
        return answers(call)

    rows, path = write_rows(tmp_path / "rows.jsonl", list("abcdef")), tmp_path / "a.fbr"
    url = ("--url", words_server.url)
    with scripted(answer) as engine:
        recorded = start(words_server, rows, engine.url, num_process=2 * GROUP_SIZE)
        recorded.take(num_groups=2, wait_s=30)
        assert forebay("recording", "export", recorded.run_id, path, *url).code == 0
        for source in (recorded.run_id, str(path)):
            (warning,) = warnings_of(words_server, source)
            assert f"{recorded.run_id} had not ended: 2 groups" in warning
            assert "Groups left out: 4." in warning
        assert "Groups left out: 4." in forebay("start", "--replay", recorded.run_id, *url).err
        rest.set()
        finished(recorded)
    assert warnings_of(words_server, recorded.run_id) == []


def test_open_groups_of_a_run_without_a_plan_are_counted(server: ServerProcess) -> None:
    recorded = server.start_run("idle", SIZE)
    for name in ("a", "b"):
        write_group(recorded, name, [0.0, 1.0, 0.5, 0.25])
    write_group(recorded, "c", [0.0])
    recorded.take(num_groups=2)
    (warning,) = warnings_of(server, recorded.run_id)
    assert "2 groups that were read or had ended are replayed. Groups left out: 1, and all later ones" in warning
    recorded.stop()
    assert warnings_of(server, recorded.run_id) == []


def test_max_staleness_is_warned_of_with_the_recorded_weight_versions(server: ServerProcess) -> None:
    recorded = server.start_run("idle", SIZE, max_staleness=2)
    write_group(recorded, "old", [0.0, 1.0, 0.5, 0.25], weight_versions=[1, 2])
    write_group(recorded, "new", [0.0, 1.0, 0.5, 0.25])
    recorded.stop()
    (warning,) = warnings_of(server, recorded.run_id)
    assert "max_staleness is 2, and the recorded samples have weight versions 1 to 3" in warning
    assert warnings_of(server, recorded.run_id, max_staleness=None) == []


def test_changed_code_is_warned_of_by_the_names_of_its_files(
    make_server: MakeServer, forebay: Forebay, tmp_path: Path
) -> None:
    tasks, path = tmp_path / "tasks", tmp_path / "a.fbr"
    write_generator(tasks, HOOKED, "hooked_generator.py")
    for name in ("kept", "edited", "gone"):
        (tasks / f"{name}.py").write_text("LEAST = 0\n")
    server = make_server(generators=tasks, start_wait_s=60)
    recorded: NativeRun = server.start_run("hooked", SIZE)
    write_group(recorded, "a", [0.0, 1.0, 0.5, 0.25])
    recorded.stop()
    assert forebay("recording", "export", recorded.run_id, path, "--url", server.url).code == 0
    (tasks / "edited.py").write_text("LEAST = 1\n")
    (tasks / "gone.py").rename(tasks / "found.py")
    words = "the generator's code changed since the recording: edited.py, found.py (new), gone.py (removed)"
    for source in ({"source": recorded.run_id, "code": "today"}, str(path)):
        assert warnings_of(server, source) == [words]
    assert warnings_of(server, recorded.run_id) == []
