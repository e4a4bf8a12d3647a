"""``start``, ``status`` and ``stop`` against a real server."""

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Forebay
from tests.kit import ServerProcess, make_group, make_sample, poll_until, write_generator
from tests.lent import lend_runs

WRITES = """
import json
from urllib.request import Request, urlopen
TASK_TYPE = "writes"

def run_rollout(data):
    for reward in (0, 1):
        sample = {"uid": str(reward), "instance_id": "a", "messages": [], "reward": reward}
        headers = {"Content-Type": "application/json"}
        urlopen(Request(data["remote_buffer_url"] + "/buffer/write", json.dumps(sample).encode(), headers)).read()
"""
MakeServer = Callable[..., ServerProcess]


@pytest.fixture
def target(server: ServerProcess) -> list[str]:
    return ["--url", server.url]


def start(forebay: Forebay, target: list[str], *more: str) -> str:
    outcome = forebay("start", "--task-type", "idle", "--group-size", "2", *more, *target)
    assert outcome.code == 0, outcome
    return outcome.out.strip()


def test_start_prints_the_run_id_and_nothing_else(forebay: Forebay, target: list[str], server: ServerProcess) -> None:
    run_id = start(forebay, target)
    view = server.client.get(f"/v1/runs/{run_id}").json()
    assert view["settings"]["group_size"] == 2
    forebay("stop", run_id, *target)


def test_a_run_comes_from_a_file_and_flags_replace_its_fields(
    forebay: Forebay, target: list[str], server: ServerProcess, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('task_type = "idle"\ngroup_size = 3\ngroup_timeout_seconds = 5\n[sampling_params]\ntop_p = 0.5\n')
    outcome = forebay("start", file, "--group-size", 4, "--set", "group_timeout_seconds=7.5", "--json", *target)
    view = json.loads(outcome.out)
    assert view["settings"]["group_size"] == 4
    assert view["settings"]["group_timeout_seconds"] == 7.5
    forebay("stop", view["run_id"], *target)


def test_an_input_file_that_is_here_is_sent_with_its_whole_path(
    forebay: Forebay, target: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    run_id = start(forebay, target, "--input-file", "tasks.jsonl")
    view = json.loads(forebay("status", run_id, "--json", *target).out)
    assert view["input_file"] == str(tmp_path / "tasks.jsonl")
    forebay("stop", run_id, *target)


def test_status_lists_runs_and_shows_one_by_its_name(
    forebay: Forebay, target: list[str], server: ServerProcess
) -> None:
    run_id = start(forebay, target, "--name", "by-name")
    server.client.put(f"/v1/runs/{run_id}/weight_version", json={"weight_version": 17})
    listed = forebay("status", *target)
    assert run_id in listed.out
    assert run_id in [view["run_id"] for view in json.loads(forebay("status", "--json", *target).out)["runs"]]
    shown = forebay("status", "by-name", "--log", 5, *target)
    assert run_id in shown.out
    assert re.search(r"weight version +17\b", shown.out)
    assert "is_valid_group: built-in" in shown.out
    assert "is stopped" in forebay("stop", "by-name", *target).out


@pytest.mark.parametrize(("said", "shown"), [([-1, 2.5], r"\[-1, 2.5\]"), (None, "any finite number")])
def test_status_shows_which_rewards_count(forebay: Forebay, target: list[str], said: object, shown: str) -> None:
    run_id = start(forebay, target, "--set", f"reward_range={json.dumps(said)}")
    assert re.search(rf"reward range +{shown} *\n", forebay("status", run_id, *target).out)
    forebay("stop", run_id, *target)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ([], "pull: window=64, affinity=1.25"),
        (["--policy", "static"], "static: window=64"),
        (["--policy", "longest-first", "--set", "scheduler.window=7"], "longest-first: window=7, affinity=1.25"),
        (["--policy", "static", "--set", 'scheduler={"window": 8}'], "static: window=8"),
        (["--policy", "static", "--set", "scheduler.policy=pull"], "pull: window=64, affinity=1.25"),
        (["--policy", "static", "--set", "oversampling.groups_per_step=5"], "static: window=5"),
    ],
)
def test_status_shows_the_policy_that_a_start_chose(
    forebay: Forebay, server: ServerProcess, target: list[str], tmp_path: Path, said: list[str], shown: str
) -> None:
    lend_runs(server)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q"}\n')
    given = ["--task-type", "lent", "--group-size", "2", "--input-file", str(tmp_path / "rows.jsonl")]
    outcome = forebay("start", *given, *said, *target)
    assert outcome.code == 0, outcome
    run_id = outcome.out.strip()
    assert re.search(rf"scheduler +{re.escape(shown)} *\n", forebay("status", run_id, *target).out)
    forebay("stop", run_id, *target)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (["--policy", "fastest"], "known policies: longest-first, probe, pull, static"),
        (["--policy", "pull", "--set", "scheduler.top=0.3"], "'pull' does not use top"),
        (["--set", "scheduler=3", "--policy", "pull"], "scheduler: must be an object, got 3"),
        (["--set", "scheduler=3", "--set", "scheduler.top=0.3"], "scheduler must be an object (got 3)"),
    ],
)
def test_a_scheduler_that_cannot_work_is_refused(
    forebay: Forebay, server: ServerProcess, target: list[str], said: list[str], message: str
) -> None:
    lend_runs(server)
    outcome = forebay("start", "--task-type", "lent", "--group-size", "2", "--input-file", "x", *said, *target)
    assert outcome.code in (1, 2), outcome
    assert message in " ".join(outcome.err.split())


def test_status_shows_the_mean_of_rewards_whose_sum_is_beyond_float64(
    forebay: Forebay, target: list[str], server: ServerProcess
) -> None:
    run = server.start_run(group_size=2)
    for name, low, high in (("a", 1e308, 1.5e308), ("b", -1.5e308, -1e308)):
        run.write(*make_group(name, [low, high]))
    assert run.view()["rewards"] == {"num": 4, "mean": pytest.approx(0, abs=1e293), "min": -1.5e308, "max": 1.5e308}
    shown = forebay("status", run.run_id, *target)
    assert shown.code == 0, shown
    assert re.search(r"rewards +mean .* min -1.5e\+308", shown.out)
    run.stop()


def test_follow_shows_progress_until_the_run_has_ended(
    forebay: Forebay, target: list[str], server: ServerProcess, tmp_path: Path
) -> None:
    def write_a_group_and_stop() -> None:
        view = poll_until(
            lambda: next((v for v in server.client.get("/v1/runs").json()["runs"] if v["name"] == "followed"), None)
        )
        path = f"/v1/runs/{view['run_id']}"
        told = {"status": "failed", "error": {"type": "E", "message": "m"}, "reward": None}
        broken = [make_sample(instance_id="b", **told) for _ in range(2)]
        server.client.post(f"{path}/samples", json=[*make_group("a", [0.0, 1.0]), *broken])
        server.client.post(f"{path}/stop")

    writer = threading.Thread(target=write_a_group_and_stop)
    writer.start()
    followed = ["start", "--task-type", "idle", "--group-size", 2, "--name", "followed", "--follow"]
    outcome = forebay(*followed, *target)
    writer.join()
    assert outcome.code == 0, outcome
    assert "4 in · 2 failed" in outcome.err
    assert "stopped, ended" in outcome.err
    run_id = outcome.out.strip()
    assert re.search(rf"failed samples: 2; `\S*forebay status {run_id} --log 20`", outcome.err)
    # What `status` shows of the ended run stands at the end, but for the time that has passed since.
    summary = [line.rstrip() for line in forebay("status", run_id, *target).out.splitlines() if "ago" not in line]
    assert re.search(r"groups +ready 1 · discarded 1\n(.|\n)*1 failed: every rollout failed", "\n".join(summary))
    assert re.search(r"rewards +mean 0\.500 · min 0 · max 1", outcome.err)
    assert [line for line in summary if line not in outcome.err] == []


@pytest.mark.parametrize("rewards", [[1.0, 1.0], []])
def test_follow_of_a_run_of_which_nothing_is_usable_ends_with_1(
    forebay: Forebay, target: list[str], server: ServerProcess, rewards: list[float]
) -> None:
    name = f"unusable-{len(rewards)}"

    def write_and_stop() -> None:
        view = poll_until(
            lambda: next((v for v in server.client.get("/v1/runs").json()["runs"] if v["name"] == name), None)
        )
        if rewards:
            server.client.post(f"/v1/runs/{view['run_id']}/samples", json=make_group("a", rewards)).raise_for_status()
        server.client.post(f"/v1/runs/{view['run_id']}/stop").raise_for_status()

    writer = threading.Thread(target=write_and_stop)
    writer.start()
    outcome = forebay("start", "--task-type", "idle", "--group-size", 2, "--name", name, "--follow", *target)
    writer.join()
    assert outcome.code == 1, outcome
    what = "all its groups were discarded: 1 invalid" if rewards else "it produced no group"
    assert f"error: {outcome.out.strip()} has no groups to train on: {what}" in outcome.err
    assert "hint: " in outcome.err


def test_follow_ends_when_a_generator_of_another_kind_has_returned(
    forebay: Forebay, target: list[str], server: ServerProcess, tmp_path: Path
) -> None:
    write_generator(server.generators, WRITES, "writes_generator.py")
    outcome = forebay("start", "--task-type", "writes", "--group-size", 2, "--follow", *target)
    assert outcome.code == 0, outcome
    view = server.client.get(f"/v1/runs/{outcome.out.strip()}").json()
    assert (view["groups"]["ready"], view["has_ended"]) == (1, False), "the run itself waits for other writers"


def test_status_shows_which_engine_a_run_waits_for_without_its_password(
    forebay: Forebay, target: list[str], server: ServerProcess
) -> None:
    run = server.start_run(remote_engine_url="http://me:secret@127.0.0.1:1/v1, http://127.0.0.1:2,nonsense")
    shown = forebay("status", run.run_id, *target).out
    assert re.search(r"engine +http://127\.0\.0\.1:1/v1\s+http://127\.0\.0\.1:2\s", shown)
    assert "secret" not in json.dumps(run.view())
    run.stop()


def test_help_is_not_cut(forebay: Forebay) -> None:
    for command in ([], ["engine"], ["generators"]):
        assert "..." not in forebay(*command, "--help").out.partition("Commands:")[2]
    assert "[[" not in forebay("start", "--help").out + forebay("status", "--help").out


def test_groups_that_are_full_are_called_full_while_no_trainer_has_asked(
    forebay: Forebay, target: list[str], server: ServerProcess
) -> None:
    run = server.start_run(group_size=2)
    run.write(*make_group("full", [0.0, 1.0]), *make_group("not yet", [1.0]))
    assert (run.view()["groups"]["open"], run.view()["num_groups_full"]) == (2, 1)
    assert re.search(r"groups +open 1 · full 1\b", forebay("status", run.run_id, *target).out)
    assert "open 1 · full 1" in forebay("status", *target).out
    run.take(num_groups=1)
    assert run.view()["num_groups_full"] == 0
    assert re.search(r"groups +open 1 · delivered 1\b", forebay("status", run.run_id, *target).out)
    run.stop()


def test_a_run_that_fails_ends_the_command_with_1(forebay: Forebay, make_server: MakeServer) -> None:
    crashing = make_server(max_restarts=0)
    (crashing.generators / "crash_generator.py").write_text(
        'TASK_TYPE = "crash"\ndef run_rollout(data):\n    raise SystemExit(3)\n'
    )
    outcome = forebay("start", "--task-type", "crash", "--group-size", 2, "--follow", "--url", crashing.url)
    assert outcome.code == 1
    assert "failed: SystemExit: 3" in outcome.err
    assert "forebay status" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["start"], 2, "--task-type NAME"),
        (["start", "--task-type", "idle"], 1, "--group-size N"),
        (["start", "--task-type", "idle", "--group-size", "2", "--set", "x"], 2, "NAME=JSON"),
        (["start", "nowhere.json"], 2, "nowhere.json"),
        (["start", "--task-type", "unheard-of", "--group-size", "2"], 1, "known task types"),
        (["status", "run-nowhere"], 1, "has no run"),
        (["stop", "run-nowhere"], 1, "has no run"),
    ],
)
def test_what_is_wrong_is_told_in_a_line_with_a_hint(
    forebay: Forebay, target: list[str], arguments: list[str], code: int, told: str
) -> None:
    outcome = forebay(*arguments, *target)
    assert outcome.code == code
    assert told in outcome.err
    assert outcome.err.count("hint: ") == 1


@pytest.mark.parametrize("url", ["127.0.0.1:8889", "ftp://h", "http://", "http://h:99999", "http://[::1", "http://h:x"])
def test_an_address_that_is_none_is_wrong_usage(forebay: Forebay, url: str) -> None:
    assert forebay("status", "--url", url).code == 2


def test_a_server_that_is_not_there_is_told(forebay: Forebay) -> None:
    outcome = forebay("status", "--url", "http://127.0.0.1:9")
    assert outcome.code == 1
    assert "forebay serve" in outcome.err


def test_the_token_opens_a_guarded_server(forebay: Forebay, make_server: MakeServer) -> None:
    guarded = make_server(token="secret")
    refused = forebay("status", "--url", guarded.url)
    assert refused.code == 1
    assert "FOREBAY_TOKEN" in refused.err
    assert forebay("status", "--url", guarded.url, "--token", "secret").code == 0


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        ((0.0, 1.0), "3 groups ready, but no trainer has read a batch of this run yet"),
        ((1.0, 1.0), "all 3 finished groups were discarded, most as invalid: all rewards are equal"),
        ((None, None), "all 6 rollouts so far failed"),
    ],
)
def test_status_names_in_its_first_line_why_the_trainer_has_nothing(
    forebay: Forebay, target: list[str], server: ServerProcess, rewards: tuple[float | None, ...], problem: str
) -> None:
    run = server.start_run(group_size=2)
    failed = {} if rewards[0] is not None else {"status": "failed", "error": {"kind": "oops", "message": "no"}}
    run.write(*[sample for number in range(3) for sample in make_group(number, rewards, **failed)])
    if rewards[0] == rewards[1] and not failed:
        assert run.read(num_groups=1)["batch_id"] is None
    shown = forebay("status", run.run_id, *target).out
    assert shown.startswith("problem"), shown
    assert problem in " ".join(shown.split())
    run.stop()
