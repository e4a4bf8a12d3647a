"""``slime_generate``: functions written for slime and miles, unchanged, on a real server."""

import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.client import slime
from forebay.core.errors import InvalidInput
from forebay.engines.scripted import Reply, ScriptedCall, ScriptedEngine, ThreadedEngine
from forebay.generators.slime_generate_generator import run_rollout
from tests.client import slime_stand_in
from tests.conftest import MakeServer
from tests.generators.agent_kit import LIMIT_S
from tests.kit import Json, NativeRun, ServerProcess, poll_until

CHECKOUT = Path(__file__).parent / "slime_checkout"
Start = Callable[..., NativeRun]


def answers() -> Callable[[ScriptedCall], str]:
    """Two right ones, two wrong ones, and so on: a rollout asks twice."""
    numbers = itertools.count()
    return lambda _: "no idea" if next(numbers) // 2 % 2 else "it is 4"


@pytest.fixture(scope="module")
def server(module_servers: MakeServer) -> Iterator[ServerProcess]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(CHECKOUT))
        yield module_servers(start_wait_s=60)


@pytest.fixture(scope="module")
def engine() -> Iterator[ThreadedEngine]:
    with ScriptedEngine(answers()).in_thread() as engine:
        yield engine


@pytest.fixture
def start(server: ServerProcess, engine: ThreadedEngine, tmp_path: Path) -> Start:
    def started(*prompts: str, **payload: Any) -> NativeRun:
        rows = [{"instance_id": p, "prompt": p, "label": 4, "truth": ["4"], "metadata": {"of": p}} for p in prompts]
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        given = {"input_file": str(tmp_path / "rows.jsonl"), "remote_engine_url": engine.url, "num_process": 1}
        return server.start_run("slime_generate", 4, **{**given, "max_tokens": 64, "max_attempts": 1, **payload})

    return started


def rows_of(run: NativeRun) -> list[Json]:
    rows: list[Json] = run.take(num_groups=1, wait_s=60)["data"]
    return rows


def test_generate_and_reward_functions_of_slime_run_unchanged(start: Start) -> None:
    run = start("what is 2+2?", generate="searching:generate", reward="searching.reward", args={"reward_key": "score"})
    rows = rows_of(run)
    assert sorted(row["raw_reward"] for row in rows) == [0, 0, 1, 1]
    for row in rows:
        response = row["messages"][-1]["content"]
        assert bytes(row["tokens"]).decode() == f"what is 2+2?{response}"
        assert (len(row["tokens"]), row["response_length"]) == (len("what is 2+2?" + response), len(response))
        assert row["logprobs"] == [-0.5 * bit for bit in row["loss_mask"]]
        trained = bytes(token for token, bit in zip(row["tokens"], row["loss_mask"], strict=True) if bit).decode()
        assert trained == response.replace(" [found] ", "")
        assert row["extra_info"]["metadata"] == {"of": "what is 2+2?", "turns": 2}
        assert row["outcome"] == "ok"


def test_a_list_of_samples_is_a_rollout_with_forks(start: Start) -> None:
    functions = {"generate": "searching:generate_forks", "reward": "searching:reward"}
    run = start("long one", **functions, args={"reward_key": "score"})
    rows = rows_of(run)
    assert [row.get("fork", 0) for row in rows] == [0, 1] * 4
    assert [row["messages"][-1]["content"] == "a fork" for row in rows] == [False, True] * 4
    assert {row["outcome"] for row in rows} == {"truncated"}


def test_a_function_may_change_its_sample_and_return_it_in_a_list(start: Start) -> None:
    functions = {"generate": "importing_late:generate", "reward": "importing_late:reward"}
    rows = rows_of(start("what is 2+2?", **functions, args={"label_key": "truth"}))
    assert sorted(row["raw_reward"] for row in rows) == [0, 0, 1, 1]
    assert not any(row.get("fork") for row in rows)


def test_prompts_are_made_as_by_slimes_data_set(start: Start) -> None:
    functions = {"generate": "searching:generate", "reward": "searching:reward"}
    template = {"apply_chat_template": True, "apply_chat_template_kwargs": {"enable_thinking": False}}
    args = {"reward_key": "score", "hf_checkpoint": "model", **template, "tool_key": "truth"}
    row = rows_of(start("what is 2+2?", **functions, args=args))[0]
    prompt = "['4'] {'tokenize': False, 'enable_thinking': False} what is 2+2?\n"
    assert bytes(row["tokens"]).decode().startswith(prompt)
    assert row["extra_info"]["metadata"] == {"of": "what is 2+2?", "tools": ["4"], "turns": 2}


@pytest.fixture
def slime_args(server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Of a training whose rollout function is Forebay's, on eight prompts; its ``rollout_buffer_settings`` are free."""
    for name, module in slime_stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"prompt {number}.", "label": 4}) + "\n" for number in range(8)))
    yield slime_stand_in.arguments(
        server.url, rollout_task_type="slime_generate", prompt_data=str(rows), save=str(tmp_path), rollout_num_process=8
    )
    slime.close()


def test_beside_the_trainer_no_call_of_a_function_keeps_the_engine_busy(slime_args: Any) -> None:
    firsts: Counter[str] = Counter()

    def script(call: ScriptedCall) -> Reply:
        prompt, _, said = call.messages[-1]["content"].partition(".")
        if prompt not in ("prompt 0", "prompt 1"):
            return Reply(text="never", hang=True)
        firsts[prompt] += not said
        return Reply(text="done" if said else "it is 4" if firsts[prompt] % 2 else "no idea")

    with ScriptedEngine(script).in_thread() as engine:
        slime_args.colocate, args = True, {"reward_key": "score"}
        functions = {"generate": "searching:generate", "reward": "searching:reward", "args": args}
        slime_args.rollout_buffer_settings = {"remote_engine_url": engine.url, **functions}
        output = slime.generate_rollout(slime_args, 0, None)
        assert {group[0].metadata["instance_id"] for group in output.samples} == {0, 1}
        engine.wait_in_flight(0, timeout_s=20)


def test_functions_are_told_of_an_evaluation(slime_args: Any, engine: ThreadedEngine) -> None:
    slime_args.eval_prompt_data = ["exam", slime_args.prompt_data]
    functions = {"generate": "searching:generate_anywhere", "reward": "searching:reward"}
    slime_args.rollout_buffer_settings = {
        "remote_engine_url": engine.url,
        **functions,
        "args": {"reward_key": "score"},
    }
    output = slime.generate_rollout(slime_args, 0, None, evaluation=True)
    samples = output.data["exam"]["samples"]
    assert [sample.metadata["metadata"]["evaluation"] for sample in samples] == [True] * 8


def test_what_slime_would_not_train_on_has_failed_and_no_reward(start: Start) -> None:
    functions = {"generate": "searching:generate", "reward": "searching:reward", "args": {"reward_key": "score"}}
    run = start("aborted", "torn", **functions)
    outcomes = poll_until(lambda: view["outcomes"] if (view := run.view())["has_ended"] else {}, LIMIT_S)
    assert (outcomes["engine_failure"], outcomes["agent_failure"], outcomes["ok"]) == (4, 4, 0)


def test_an_agent_function_of_miles_talks_to_the_gateway(start: Start) -> None:
    run = start("what is 2+2?", agent="searching:agent", reward="searching:agent_reward")
    rows = rows_of(run)
    assert sorted(row["raw_reward"] for row in rows) == [0, 0, 1, 1]
    assert all(sum(row["loss_mask"]) and row["tokens"] for row in rows), "the gateway has recorded its tokens"


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        ({}, "generate None"),
        ({"generate": "searching:nowhere"}, "generate 'searching:nowhere'"),
        ({"generate": "searching:generate", "args": [1]}, "args must be an object"),
        ({"generate": "searching:generate", "args": {"group_rm": True}}, "slime_generate has no group_rm"),
    ],
)
def test_what_cannot_be_run_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, payload: Json, told: str) -> None:
    monkeypatch.syspath_prepend(CHECKOUT)
    addresses = {"remote_engine_url": "http://engine", "remote_buffer_url": "http://buffer/w/key"}
    with pytest.raises(InvalidInput, match=re.escape(told)):
        run_rollout({**addresses, "input_file": "rows.jsonl", **payload})
