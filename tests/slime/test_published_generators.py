"""Generators as people have written them for slime, in a checkout of slime, with the one documented line changed."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.engines.scripted import ScriptedCall, ScriptedEngine
from forebay.engines.scripted.tokens import TURN_END, encode, encode_chat
from tests.conftest import MakeServer
from tests.kit import Json, ServerProcess, SlimeRun, poll_until
from tests.slime import published_kit

IDS = ["a", "b", "c"]


@pytest.fixture
def answers() -> "Counter[str]":
    """How often each prompt was answered."""
    return Counter()


@pytest.fixture
def payload(tmp_path: Path, answers: "Counter[str]") -> Iterator[Json]:
    """A start as slime's client sends it; the answers to a prompt grow by a letter each."""

    def script(call: ScriptedCall) -> str:
        answers[call.prompt] += 1
        return "x" * answers[call.prompt]

    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"instance_id": i, "prompt": f"row {i}"}) + "\n" for i in IDS))
    with ScriptedEngine(script).in_thread() as engine:
        yield {
            "remote_engine_url": engine.url,
            "input_file": str(path),
            "num_process": "2",
            "num_epoch": "1",
            "sampling_params": {"max_tokens": 64, "temperature": 0.8},
        }


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return published_kit.write_checkout(tmp_path)


def fetched(run: SlimeRun, num_groups: int) -> list[Json]:
    """The rows of so many groups, whole ones all of them."""
    rows: list[Json] = []

    def is_all_there() -> bool:
        rows.extend(run.fetch()["data"]["data"])
        return len(rows) >= 2 * num_groups

    poll_until(is_all_there)
    assert set(Counter(row["instance_id"] for row in rows).values()) == {2 * num_groups // len(IDS)}
    return rows


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_subclass_with_its_own_workers_client_and_writes_runs(
    make_server: MakeServer, checkout: Path, payload: Json, method: str
) -> None:
    server = make_server(generators=checkout)
    run = server.start_slime(task_type="workers", group_size=2, method=method, **payload)
    rows = fetched(run, 3)
    assert sorted({row["instance_id"] for row in rows}) == IDS
    assert sorted(row["raw_reward"] for row in rows) == [0, 0, 0, 1, 1, 1]
    assert all(row["messages"][-1]["role"] == "assistant" for row in rows)
    assert run.view()["samples"]["buffered"] == 0, "nothing is left, nothing was written twice"


def test_its_crash_costs_no_group_and_generates_none_twice(
    make_server: MakeServer, checkout: Path, payload: Json, tmp_path: Path, answers: "Counter[str]"
) -> None:
    server = make_server(generators=checkout, env={"CRASH_ONCE_AT_B": str(tmp_path / "crashed")})
    run = server.start_slime(task_type="workers", group_size=2, **{**payload, "num_process": "1"})
    run.wait_for_state("finished")
    assert (tmp_path / "crashed").exists()
    assert [(group["instance_id"], group["epoch"], group["num_samples"]) for group in run.groups()] == [
        (name, 0, 2) for name in IDS
    ]
    assert answers["row a"] == 2, "the group that was complete is not generated once more"


def test_its_calls_are_captured_by_the_gateway(make_server: MakeServer, checkout: Path, payload: Json) -> None:
    server = make_server(generators=checkout)
    run = server.start_slime(task_type="workers", group_size=2, capture=True, **payload)
    for row in fetched(run, 3):
        prompt, answer = encode_chat(row["messages"][:-1]), encode(row["messages"][-1]["content"])
        assert row["tokens"] == [*prompt, *answer, TURN_END]
        assert row["loss_mask"] == [0] * len(prompt) + [1] * (len(answer) + 1)
        assert row["token_spans"][-1]["model"] == "default"
    assert run.view()["warnings"] == []


def test_a_subclass_with_its_own_loop_over_epochs_gets_another_pass_each_time(
    make_server: MakeServer, checkout: Path, payload: Json
) -> None:
    server = make_server(generators=checkout)
    run = server.start_slime(task_type="epochs", group_size=2, **{**payload, "num_epoch": "3"})
    run.wait_for_state("finished")
    groups = Counter((group["instance_id"], group["epoch"]) for group in run.groups())
    assert groups == {(name, epoch): 1 for name in IDS for epoch in range(3)}
    assert all(group["num_samples"] == 2 for group in run.groups())
    path = f"{run.path}/groups/{run.groups()[0]['group_id']}"
    for sample in run.client.get(path, params={"bodies": True}).json()["samples"]:
        _, hint, _ = sample["body"]["messages"]
        assert (hint["role"], set(hint["content"])) == ("system", {"x"}), "self.client asked the engine"


def test_a_run_keeps_the_code_that_it_imports_by_these_names(
    make_server: MakeServer, checkout: Path, payload: Json, tmp_path: Path
) -> None:
    go_on = tmp_path / "go_on"
    waiting = (checkout / "workers_generator.py").read_text()
    late = "import pathlib, time\n    while not pathlib.Path(data['go_on']).exists():\n        time.sleep(0.02)\n"
    late += "    from generator.late import REWARD\n    from slime_plugins.rollout_buffer.generator.late import WORD\n"
    late += "    print('imported', REWARD, WORD)\n"
    (checkout / "workers_generator.py").write_text(
        waiting.replace("run_rollout(data):\n", f"run_rollout(data):\n    {late}")
    )
    (checkout / "late.py").write_text("REWARD, WORD = 1.0, 'before'\n")
    server = make_server(generators=checkout)
    run = server.start_slime(task_type="workers", group_size=2, go_on=str(go_on), **payload)
    run.wait_for_state("running")
    (checkout / "late.py").write_text("REWARD, WORD = 0.0, 'after'\n")
    go_on.touch()
    fetched(run, 3)
    log = run.client.get(f"{run.path}/log").json()["lines"]
    assert "imported 1.0 before" in log


def test_slimes_own_base_generator_says_what_to_do(make_server: MakeServer, checkout: Path) -> None:
    server = make_server(generators=checkout)
    infos = {Path(info["path"]).name: info for info in generators(server)}
    assert infos["base_generator.py"]["status"] == "failed"
    assert "install slime where the server runs" in infos["base_generator.py"]["error"]
    assert {
        name: info["status"] for name, info in infos.items() if name in ("workers_generator.py", "epochs_generator.py")
    } == {
        "workers_generator.py": "ok",
        "epochs_generator.py": "ok",
    }
    assert (infos["workers_generator.py"]["imports_base"], infos["epochs_generator.py"]["imports_base"]) == (
        False,
        True,
    )


def generators(server: ServerProcess) -> list[Json]:
    infos: list[Json] = server.client.get("/v1/generators").json()["generators"]
    return infos
