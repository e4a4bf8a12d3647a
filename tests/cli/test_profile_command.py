"""``forebay profile`` over logs on this disk and runs of a server."""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.engines.scripted import ScriptedCall, ScriptedEngine
from tests.cli.conftest import Forebay
from tests.kit import ServerProcess, poll_until
from tests.telemetry.planted_log import clean_step, silence, write_log
from tests.telemetry.report_kit import HOSTILE


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps of verl's log; in the second a worker is silent for 150 s."""
    steps = [clean_step(random.Random(seed), seed) for seed in range(4)]
    silence(steps[1], "0", 25.0, 175.0)
    return write_log(tmp_path_factory.mktemp("logs") / "multiturn_log_dir" / "experiment", steps)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_costliest_finding_is_on_the_first_screen(forebay: Forebay, log: Path) -> None:
    outcome = forebay("profile", log)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[1].startswith("4 steps · ")
    first = next(index for index, line in enumerate(lines) if line.split()[:1] == ["lost"]) + 1
    assert "Step 2" in lines[first]
    lost = [float(found[1]) for line in lines if (found := re.match(r" *([\d.]+) s  +[\d.]+ %", line))]
    assert lost == sorted(lost, reverse=True)
    assert lost[0] == pytest.approx(150, rel=0.1)
    assert re.search(r"[\d.]+ % of step 2 ", lines[first])
    (tail,) = [line for line in lines if line.startswith("80 % of the requests end in the first ")]
    assert re.search(r" of the time; in step [1-4], [\d.]+ %\.$", tail)
    assert any(re.match(r"Waiting for \d+ % of the requests would have saved [\d.]+ s a step", line) for line in lines)
    steps = next(index for index, line in enumerate(lines) if line.split()[:2] == ["step", "seconds"])
    assert steps > first
    assert "training" not in lines[steps]  # the log tells none
    assert [line.split()[0] for line in lines[steps + 1 : steps + 5]] == ["1", "2", "3", "4"]


def test_a_folder_is_told_by_what_is_in_it(forebay: Forebay, log: Path) -> None:
    assert forebay("profile", log.parent).code == 0
    assert forebay("profile", log.parent.parent).code == 0


@pytest.mark.parametrize(("flag", "value"), [("--step", "77"), ("--worker", "eleven")])
def test_a_step_or_worker_that_is_not_there_names_those_that_are(
    forebay: Forebay, log: Path, flag: str, value: str
) -> None:
    outcome = forebay("profile", log, flag, value)
    assert (outcome.code, outcome.out) == (2, "")
    assert repr(value) in outcome.err
    assert ("1, 2, 3, 4" if flag == "--step" else "0, 1, 2, 3") in outcome.err


def test_one_step_and_one_worker_can_be_looked_at(forebay: Forebay, log: Path) -> None:
    report = json.loads(forebay("profile", log, "--step", "2", "--worker", "0", "--format", "json").out)
    assert [step["name"] for step in report["steps"]] == ["2"]
    assert list(report["steps"][0]["requests_by_worker"]) == ["0"]


def test_json_has_the_data_of_the_pictures(forebay: Forebay, log: Path) -> None:
    report = json.loads(forebay("profile", log, "--format", "json").out)
    assert report["schema"] == 2
    assert {"findings", "steps", "curves", "gaps", "lanes", "engines", "outliers", "whatifs", "phase_shares"} <= set(
        report
    )
    assert len([curve for curve in report["curves"] if not curve.get("worker")]) == 4


@pytest.mark.parametrize(("name", "begins"), [("r.html", "<!doctype html>"), ("r.md", "# "), ("r.json", "{")])
def test_the_ending_of_the_output_says_the_format(
    forebay: Forebay, log: Path, here: Path, name: str, begins: str
) -> None:
    outcome = forebay("profile", log, "--output", name)
    assert (outcome.code, outcome.out) == (0, f"wrote {name}\n")
    assert (here / name).read_text().startswith(begins)


def test_a_page_without_a_name_is_called_after_its_run(forebay: Forebay, log: Path, here: Path) -> None:
    assert forebay("profile", log, "--format", "html").out == "wrote profile-experiment.html\n"
    assert (here / "profile-experiment.html").read_text().startswith("<!doctype html>")


def test_a_dash_is_standard_output(forebay: Forebay, log: Path) -> None:
    outcome = forebay("profile", log, "--format", "md", "--output", "-")
    assert outcome.out == forebay("profile", log, "--format", "md").out
    assert "## Findings" in outcome.out


def test_runs_are_set_side_by_side(forebay: Forebay, log: Path, tmp_path: Path) -> None:
    others = [
        write_log(tmp_path / name, [clean_step(random.Random(seed), number) for number in range(2)])
        for seed, name in enumerate(("calm", "quiet"))
    ]
    outcome = forebay("profile", log, "--compare", *others, "--format", "md")
    assert (outcome.code, outcome.err) == (0, "")
    table = outcome.out.partition("## Compared")[2]
    assert "|  | experiment | calm | quiet |" in table
    assert "| steps | 4 | 2 | 2 |" in table
    assert forebay("profile", log, "--compare", others[0], "--compare", others[1], "--format", "md").out == outcome.out
    document = json.loads(forebay("profile", log, "--compare", others[0], "--format", "json").out)
    assert [len(each["steps"]) for each in (document, *document["compared"])] == [4, 2]
    assert [run["name"] for run in document["comparison"]["runs"]] == ["experiment", "calm"]
    assert "calm: " in forebay("profile", log, "--compare", others[0]).out


def test_two_runs_without_compare_are_a_mistake(forebay: Forebay, log: Path) -> None:
    outcome = forebay("profile", log, log)
    assert (outcome.code, outcome.out) == (2, "")
    assert "--compare" in outcome.err


def test_a_folder_without_a_log_says_what_was_looked_for(forebay: Forebay, tmp_path: Path) -> None:
    outcome = forebay("profile", tmp_path)
    assert (outcome.code, outcome.out) == (2, "")
    message, _ = outcome.err.splitlines()
    assert f"no log is in {tmp_path}" in message
    assert "step_*/worker_*.jsonl" in message


def test_a_folder_that_is_not_there_is_named(forebay: Forebay, tmp_path: Path) -> None:
    outcome = forebay("profile", tmp_path / "gone")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"there is no folder '{tmp_path}/gone'" in outcome.err


def test_an_output_that_cannot_be_written_is_told_before_the_work(forebay: Forebay, log: Path, tmp_path: Path) -> None:
    for output, reason in ((tmp_path, "is a folder"), (tmp_path / "no" / "r.html", "there is no folder")):
        outcome = forebay("profile", log, "--format", "html", "--output", output)
        assert (outcome.code, outcome.out) == (2, "")
        assert reason in outcome.err


def test_a_page_for_which_there_is_no_room_leaves_no_half_of_one(forebay: Forebay, log: Path, tmp_path: Path) -> None:
    output = tmp_path / "full.md"
    output.symlink_to("/dev/full")
    refused = forebay("profile", log, "--output", output)
    assert refused.code == 1
    assert f"{output} cannot be written: No space left on device" in refused.err
    assert not output.is_symlink()


def test_without_the_extra_pictures_give_the_install_line(
    forebay: Forebay, log: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.core.lazy_names.find_spec", lambda _: None)
    outcome = forebay("profile", log, "--format", "html")
    assert (outcome.code, outcome.out) == (1, "")
    assert "pip install 'forebay[report]'" in outcome.err
    assert list(here.iterdir()) == []
    assert forebay("profile", log).code == 0


def test_texts_of_a_log_move_no_cursor(forebay: Forebay, tmp_path: Path) -> None:
    folder = tmp_path / "step_1"
    folder.mkdir()
    lines = []
    for index in range(12):
        extra = {"request_id": f"{HOSTILE}\x1b]0;owned\x07 [bold]{index}", "turn": 0}
        seconds = 900.0 if index == 7 else 10.0
        for event in ("turn_end", "reward_calculation", "async_rollout_request_complete"):
            stamp = f"2026-01-01T00:{int(seconds) // 60:02}:{int(seconds) % 60:02}"
            lines.append({"timestamp": stamp, "event": event, "duration_sec": seconds, "extra": extra, "workid": 0})
    (folder / "worker_0.jsonl").write_text("\n".join(map(json.dumps, lines)))
    outcome = forebay("profile", tmp_path)
    assert outcome.code == 0
    assert f"{HOSTILE}\\x1b]0;owned\\x07 [bold]7" in outcome.out.replace("\n", "").replace("  ", "")
    assert "\x1b" not in outcome.out
    written = forebay("profile", tmp_path, "--format", "html", "--output", "-").out
    assert HOSTILE not in written


@pytest.fixture
def traced_run(make_server: Callable[..., ServerProcess], tmp_path: Path) -> Iterator[ServerProcess]:
    """A server whose run ``traced`` of the example has ended, and was read."""
    example = tmp_path / "traced_generator"
    shutil.copytree(Path(__file__).parents[2] / "examples" / "traced_generator", example)

    def script(call: ScriptedCall) -> str:
        return "no idea" if len(call.messages) == 1 and call.prompt.startswith("4+3") else "8"

    with ScriptedEngine(script).in_thread() as engine:
        server = make_server(generators=example)
        payload = {"task_type": "traced-sums", "name": "traced", "input_file": str(example / "sums.jsonl")}
        payload |= {"remote_engine_url": engine.url, "num_repeat_per_sample": 2}
        run = server.start_run(**payload)
        poll_until(lambda: run.view()["state"] == "finished")
        yield server


def test_a_run_of_a_server_is_profiled_by_its_name_and_off_its_disk(
    forebay: Forebay, traced_run: ServerProcess, here: Path
) -> None:
    outcome = forebay("profile", "trac", "--url", traced_run.url, "--format", "json")
    assert (outcome.code, outcome.err) == (0, "")
    report = json.loads(outcome.out)
    assert report["source"].startswith("run-")
    assert report["num_requests"] == 8
    assert "parse" in report["phase_shares"]
    on_disk = forebay("profile", report["source"], "--data-dir", traced_run.data_dir, "--format", "json")
    assert json.loads(on_disk.out)["phase_shares"] == pytest.approx(report["phase_shares"])


def test_one_step_is_compared_with_the_same_of_others(forebay: Forebay, log: Path, tmp_path: Path) -> None:
    other = write_log(tmp_path / "calm", [clean_step(random.Random(9), number) for number in range(2)])
    document = json.loads(forebay("profile", log, "--step", "2", "--compare", other, "--format", "json").out)
    assert [[step["name"] for step in each["steps"]] for each in (document, *document["compared"])] == [["2"], ["2"]]
    outcome = forebay("profile", log, "--step", "4", "--compare", other)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"{other}: there is no step '4' (known: 1, 2)" in outcome.err
