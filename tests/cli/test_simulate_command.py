"""``forebay simulate`` over recorded logs, and populations; what it refuses, and what it draws."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.workers.simulator.populations import POPULATIONS, Population
from tests.cli.conftest import Forebay
from tests.simulator.recorded_kit import recorded_run, small_scenario, write_trace
from tests.telemetry.planted_log import clean_step, write_log

ESCAPE = "\x1b]0;owned\x07"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a trace of 48 rollouts."""
    folder = tmp_path_factory.mktemp("data") / "runs" / "run-1"
    recorded_run(folder)
    return folder


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """A population whose simulation takes no time."""
    monkeypatch.setattr("forebay.workers.simulator.simulated_source.TIMES_WHAT_FITS", 1)
    monkeypatch.setitem(
        POPULATIONS, "probe", Population("probe", 2_048, 500, 0.4, 0.3, tail_share=0.05, tail_low=2.0, tail_high=6.0)
    )
    return "probe"


def test_it_says_what_the_log_is_how_well_it_is_reproduced_and_then_a_row_each(forebay: Forebay, run: Path) -> None:
    outcome = forebay("simulate", run, "--policy", "pull,static,longest-first", "--seeds", 2)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    facts = {line.split(" ", 1)[0]: line for line in lines if line}
    assert "48 in 12 groups of 4" in facts["answers"]
    assert "CV within 0.2" in facts["groups"]
    assert "rank correlation" in facts["groups"]
    assert "false negatives" in facts["probe"]
    assert "precision" in facts["probe"]
    assert "2 engines, 16 at once" in facts["run"]
    assert "a step takes 10." in facts["engines"]
    error = float(facts["self-check"].split()[-1].strip("%"))
    assert abs(error) <= 3
    header = next(number for number, line in enumerate(lines) if line.split()[:1] == ["policy"])
    rows = [line.replace("*", " ").split()[0] for line in lines[header + 1 : header + 4]]
    assert rows == ["pull", "static", "longest-first"]
    assert all(
        name in lines[header] for name in ("p99", "waste", "stale", "KS", ">P90", "tail kept", "reward", "never")
    )
    assert "±" in outcome.out


def test_a_row_for_every_combination(forebay: Forebay, run: Path) -> None:
    held = {"groups_per_step": 4}
    arguments = ["--policy", "pull,static", "--engines", "2,4", "--num-process", "8,auto", "--seeds", 1]
    arguments += ["--set", "oversampling=null", "--set", f"oversampling={json.dumps(held)}", "--set", "train_s=1"]
    told = json.loads(forebay("simulate", run, *arguments, "--json").out)
    rows = told["rows"]
    assert len(rows) == 16
    assert {(row["policy"], row["engines"], row["num_process"]) for row in rows} == {
        (policy, engines, places) for policy in ("pull", "static") for engines in (2, 4) for places in (8, "auto")
    }
    in_steps = [row for row in rows if "groups_per_step" in row["label"]]
    assert len(in_steps) == 8
    assert all(row["measures"]["step_mean_s"]["mean"] < row["measures"]["makespan_s"]["mean"] for row in in_steps)
    names = {"step_mean_s", "step_p99_s", "trained_tokens_per_s", "waste", "staleness", "ks", "above_p90", "reward_gap"}
    assert names | {"never_trained", "tail_kept", "idle", "preemptions"} <= set(rows[0]["measures"])
    assert rows[0]["time_ratio"] == {"mean": 1.0, "margin": 0.0}
    assert abs(told["self_check"]["error"]) < 0.03
    assert told["answers"]["num_answers"] == 48


def test_more_engines_take_less_time_and_a_small_cache_more(forebay: Forebay, run: Path) -> None:
    def seconds(*arguments: object) -> list[float]:
        told = json.loads(forebay("simulate", run, "--seeds", 1, "--json", *arguments).out)
        return [row["measures"]["makespan_s"]["mean"] for row in told["rows"]]

    two, four = seconds("--engines", "2,4")
    assert four < 0.8 * two
    (tight,) = seconds("--kv", 1_500)
    assert tight > 1.2 * two


def test_a_file_a_data_directory_and_a_verl_log_will_do(forebay: Forebay, run: Path, tmp_path: Path) -> None:
    file = next((run / "trace").iterdir())
    folder = write_log(tmp_path / "log", [clean_step(random.Random(1), 1)])
    for given in (file, run.parent.parent, folder):
        outcome = forebay("simulate", given, "--seeds", 1)
        assert outcome.code == 0, outcome.err
        assert "self-check" in outcome.out
    assert "each answer counts as a prompt" in outcome.out
    by_id = forebay("simulate", "run-1", "--data-dir", run.parent.parent, "--seeds", 1)
    assert by_id.code == 0, by_id.err


def test_the_policy_of_the_run_is_simulated_where_none_is_named(forebay: Forebay, tmp_path: Path) -> None:
    from forebay.core.scheduling.scheduler import Scheduler
    from forebay.workers.simulator.scenario import simulate

    write_trace(tmp_path, simulate(small_scenario(scheduler=Scheduler(policy="static"))))
    told = json.loads(forebay("simulate", tmp_path, "--seeds", 1, "--json").out)
    assert [row["policy"] for row in told["rows"]] == ["static"]


def test_a_redraw_after_a_break_shows_in_the_upper_tail_and_not_in_ks(forebay: Forebay, tiny: str) -> None:
    told = json.loads(forebay("simulate", "--population", tiny, "--policy", "pull,probe", "--seeds", 1, "--json").out)
    pull, probe = (row["measures"] for row in told["rows"])
    assert (pull["ks"]["mean"], pull["tail_kept"]["mean"], pull["waste"]["mean"]) == (0.0, 1.0, 0.0)
    assert probe["ks"]["mean"] < 0.08
    assert probe["tail_kept"]["mean"] < 0.6
    assert probe["waste"]["mean"] > 0.01
    assert told["self_check"] is None


def test_the_rows_are_drawn(forebay: Forebay, run: Path, tmp_path: Path) -> None:
    arguments = ["simulate", run, "--policy", "pull,static", "--seeds", 1, "--plot"]
    drawn = forebay(*arguments, tmp_path / "p.png")
    assert (drawn.code, drawn.err) == (0, f"wrote {tmp_path / 'p.png'}\n")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert forebay(*arguments, tmp_path / "a.svg").code == 0
    assert (tmp_path / "a.svg").read_text().count("<path") > 10
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ([], "give RUN|FILE, or --population"),
        (["{run}", "--population", "short"], "give RUN|FILE, or --population"),
        (["--population", "huge"], "the known ones are long, probe, short"),
        (["{run}", "--policy", "fastest"], "known policies: longest-first, probe, pull, static"),
        (["{run}", "--policy", ","], "--policy is empty"),
        (["{run}", "--engines", "0"], "--engines must be between 1 and 1000000"),
        (["{run}", "--num-process", "many"], "--num-process must be between 1 and 1000000"),
        (["{run}", "--set", "oversampling"], "--set takes NAME=JSON"),
        (["{run}", "--set", "speeed=2"], "cached_share, group_size, groups_per_read, history, kv_reserve"),
        (["{run}", "--set", "oversampling={"], "--set oversampling: "),
        (["{run}", "--set", 'oversampling={"groups": 2}'], "oversampling.groups"),
        (["{run}", "--set", 'oversampling={"rollouts_per_group": 2}'], "at least the group size, 4"),
        (["{run}", "--set", 'scheduler={"top": 2}'], "scheduler.top"),
        (["{run}", "--set", "scheduler.top=2"], "scheduler.top"),
        (["{run}", "--set", "scheduler.tip=2"], "--set takes NAME=JSON"),
        (["{run}", "--set", "scheduler=3"], "scheduler must be an object"),
        (["{run}", "--set", 'scheduler={"policy": "static"}'], "set the policy by --policy"),
        (["{run}", "--set", "scheduler={}", "--set", "scheduler.top=0.3"], "gives both scheduler and scheduler.top"),
        (["{run}", "--set", "oversampling.leftover=defer"], "leftover 'defer' needs groups_per_step"),
        (["{run}", "--set", "history=3"], "history must be true or false"),
        (["{run}", "--set", "train_s=[]"], "train_s must be a number"),
        (["{run}", "--set", "train_s=-1"], "train_s must be at least 0"),
        (["{run}", "--set", "max_tokens=NaN"], "max_tokens must be a whole number"),
        (["{run}", "--set", "max_tokens=0"], "max_tokens must be at least 1"),
        (["{run}", "--set", "group_size=null"], "group_size must be a whole number"),
        (["{run}", "--set", "group_size=0"], "group_size must be at least 1"),
        (["{run}", "--set", "num_epochs=0"], "num_epochs must be at least 1"),
        (["{run}", "--set", "num_steps=2"], "num_steps needs the groups of a step"),
        (["{run}", "--set", "groups_per_read=0"], "groups_per_read must be at least 1"),
        (["{run}", "--set", "speed=0"], "speed of an engine must be above 0"),
        (["{run}", "--set", "speed=1e400"], "speed must be a number (got inf)"),
        (["{run}", "--set", "speed=[]"], "speed is an empty list"),
        (["{run}", "--set", "step_s=0", "--set", "step_s_per_sequence=0"], "step_s_per_sequence must not both be 0"),
        (["{run}", "--set", "cached_share=2"], "cached_share must be at least 0 and at most 1"),
        (["{run}", "--set", "shared_share=2"], "shared_share must be at least 0 and at most 1"),
        (["{run}", "--policy", "probe", "--engines", "1"], "probe"),
        (["{run}", "--plot", "here.pdf"], "use one of the endings .png, .svg"),
        (["{run}", "--plot", "/nowhere/p.png"], "there is no folder /nowhere"),
        (["/nowhere/else"], "there is no folder"),
    ],
)
def test_what_is_wrong_is_said_with_a_hint_before_anything_runs(
    forebay: Forebay, run: Path, arguments: list[str], field: str
) -> None:
    outcome = forebay("simulate", *(each.format(run=run) if each == "{run}" else each for each in arguments))
    assert (outcome.code, outcome.out) == (2, ""), outcome
    assert field in outcome.err
    assert "hint: " in outcome.err


def test_single_fields_of_an_object_are_set_in_what_the_run_has(forebay: Forebay, run: Path) -> None:
    tops = ["--set", "scheduler.top=0.25", "--set", "scheduler.top=0.5", "--set", "scheduler.cap=own"]
    arguments = ["--policy", "probe", *tops, "--set", "oversampling.groups_per_step=4", "--seeds", 1, "--json"]
    rows = json.loads(forebay("simulate", run, *arguments).out)["rows"]
    assert [row["label"] for row in rows] == [
        f'scheduler.top={top} scheduler.cap="own" oversampling.groups_per_step=4' for top in (0.25, 0.5)
    ]
    means = [{name: row["measures"][name]["mean"] for name in ("step_mean_s", "makespan_s")} for row in rows]
    assert all(each["step_mean_s"] < each["makespan_s"] for each in means)
    assert means[0] != means[1]


def test_a_log_that_nothing_can_be_learned_from_is_refused(forebay: Forebay, tmp_path: Path) -> None:
    from forebay.workers.simulator.scenario import simulate

    write_trace(tmp_path / "plain", simulate(small_scenario()), has_lengths=False)
    outcome = forebay("simulate", tmp_path / "plain")
    assert outcome.code == 2
    assert "has no lengths" in outcome.err
    path, _ = recorded_run(tmp_path / "broken")
    path.write_bytes(path.read_bytes() + f'{{"kind": "{ESCAPE}"}}\n'.encode())
    outcome = forebay("simulate", tmp_path / "broken")
    assert outcome.code == 2
    assert "line 51 is broken" in outcome.err
    assert "hint: " in outcome.err
    assert "\x1b" not in outcome.err


@pytest.mark.parametrize("package", ["numpy", "scipy", "matplotlib"])
def test_without_the_extra_there_is_the_line_that_installs_it(
    forebay: Forebay, run: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    import importlib.util

    found: Any = importlib.util.find_spec
    monkeypatch.setattr("forebay.core.lazy_names.find_spec", lambda name: None if name == package else found(name))
    outcome = forebay("simulate", run)
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == f"error: {package} is not installed\nhint: pip install 'forebay[sim]'\n"
