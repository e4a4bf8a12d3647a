"""How rollouts end: whose fault a failure is, how often each kind is tried again, and that no failure has a reward."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from forebay.core.errors import EngineUnavailable, InvalidInput
from forebay.core.outcome import RolloutOutcome
from forebay.engines.scripted import Reply, ScriptedEngine
from forebay.generators.base import (
    AgentFailed,
    BaseGenerator,
    EnvironmentFailed,
    JudgeFailed,
    single_turn,
)
from forebay.generators.failures import BUDGETED, outcome_of, retry_budgets

WriteRows = Callable[..., Path]


def caused_by(cause: BaseException) -> BaseException:
    error = RuntimeError("wrapped")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ValueError("a bug"), "agent_failure"),
        (SystemExit(1), "agent_failure"),
        (asyncio.CancelledError(), "agent_failure"),
        (AgentFailed("crashed"), "agent_failure"),
        (EnvironmentFailed("no sandbox"), "environment_failure"),
        (JudgeFailed("no verdict"), "judge_failure"),
        (EngineUnavailable("gone"), "engine_failure"),
        (caused_by(caused_by(EnvironmentFailed("no sandbox"))), "environment_failure"),
        (ExceptionGroup("two", [EngineUnavailable("gone"), ValueError("a bug")]), "engine_failure"),
    ],
    ids=repr,
)
def test_what_a_rollout_function_raises_says_whose_fault_it_is(error: BaseException, outcome: str) -> None:
    assert outcome_of(error) == outcome


def test_an_error_that_is_its_own_cause_is_read_all_the_same() -> None:
    error = ValueError("a knot")
    error.__cause__ = caused_by(error)
    assert outcome_of(error) == "agent_failure"


def test_each_kind_of_failure_has_its_own_budget_and_max_attempts_is_that_of_the_others() -> None:
    assert retry_budgets(None, 3) == dict.fromkeys(BUDGETED, 2)
    told = retry_budgets({"engine_failure": "7", "judge_failure": 0}, 1)
    assert told == {"engine_failure": 7, "agent_failure": 0, "environment_failure": 0, "judge_failure": 0}


@pytest.mark.parametrize(
    "wrong",
    [{"cancelled": 1}, {"ok": 1}, {"engine": 1}, {"engine_failure": -1}, {"engine_failure": 1.5}]
    + [{"judge_failure": value} for value in (None, "many", True, [])]
    + [["engine_failure"], 3],
    ids=str,
)
def test_a_wrong_budget_is_named(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="retry_budgets must be") as caught:
        BaseGenerator.from_payload({"remote_engine_url": "e", "remote_buffer_url": "b", "retry_budgets": wrong})
    assert caught.value.field == "retry_budgets"


# --- in a run

RAISED: dict[str, Callable[[], BaseException]] = {
    "agent": lambda: ValueError("a bug"),
    "environment": lambda: EnvironmentFailed("no sandbox"),
    "judge": lambda: JudgeFailed("no verdict"),
    "engine": lambda: EngineUnavailable("gone"),
}
BUDGETS = {"agent_failure": 0, "environment_failure": 1, "judge_failure": 2, "engine_failure": 1}


async def one(item: dict[str, Any]) -> float:
    return 1.0


async def run(buffer: Any, rows: Path, rollout: Any = single_turn, reward: Any = one, **changed: Any) -> Any:
    """A sample per row, by instance; rows may ask the engine to answer with a status, or to stop at the limit."""

    def answer(call: Any) -> Any:
        prompt = call.messages[-1]["content"]
        if prompt.isdecimal():
            return Reply(error_status=int(prompt))
        return Reply(text="cut", finish_reason="length") if prompt == "long" else "4"

    buffer.plan["group_size"] = 1
    async with ScriptedEngine(answer) as engine, asyncio.timeout(30):
        generator = BaseGenerator(engine.url, changed.pop("url", buffer.url), **changed)
        await generator.run_async(rows, rollout, reward)
    return {sample["instance_id"]: sample for sample in buffer.samples}


async def test_retries_of_one_kind_leave_those_of_the_others(buffer: Any, write_rows: WriteRows) -> None:
    """Each row names what its attempts raise, in order; the last of them, if there are no more, succeeds."""
    plans = {
        "agent": ["agent"],
        "environment": ["environment"],
        "environment environment": ["environment", "environment"],
        "engine environment engine": ["engine", "environment", "engine"],
        "engine environment": ["engine", "environment"],
    }
    attempts: Counter[str] = Counter()

    async def rollout(client: Any, messages: Any, params: Any) -> Any:
        name = client.rollout.instance_id
        attempts[name] += 1
        raised = plans[name][client.rollout.attempt :]
        if raised:
            raise RAISED[raised[0]]()
        return await single_turn(client, messages, params)

    rows = write_rows(*({"instance_id": name, "prompt": "q"} for name in plans))
    samples = await run(buffer, rows, rollout, retry_budgets=BUDGETS)
    assert attempts == {
        "agent": 1,
        "environment": 2,
        "environment environment": 2,
        "engine environment engine": 3,
        "engine environment": 3,
    }
    outcomes = {name: (sample["status"], sample["outcome"], sample.get("reward")) for name, sample in samples.items()}
    assert outcomes == {
        "agent": ("failed", "agent_failure", None),
        "environment": ("completed", "ok", 1.0),
        "environment environment": ("failed", "environment_failure", None),
        "engine environment engine": ("failed", "engine_failure", None),
        "engine environment": ("completed", "ok", 1.0),
    }
    assert samples["environment environment"]["error"]["type"] == "EnvironmentFailed"


async def test_the_judge_is_asked_again_and_the_rollout_is_not_run_again(buffer: Any, write_rows: WriteRows) -> None:
    asked: Counter[str] = Counter()
    rollouts: Counter[str] = Counter()

    async def rollout(client: Any, messages: Any, params: Any) -> Any:
        rollouts[client.rollout.instance_id] += 1
        return await single_turn(client, messages, params)

    async def judge(item: dict[str, Any]) -> float:
        asked[item["instance_id"]] += 1
        if item["instance_id"] == "never" or asked[item["instance_id"]] == 1:
            raise JudgeFailed("the judge is busy")
        return 0.5

    rows = write_rows({"instance_id": "later", "prompt": "q"}, {"instance_id": "never", "prompt": "q"})
    samples = await run(buffer, rows, rollout, judge, max_attempts=2)
    assert (asked, rollouts) == ({"later": 2, "never": 2}, {"later": 1, "never": 1})
    assert (samples["later"]["outcome"], samples["later"]["reward"]) == ("ok", 0.5)
    never = samples["never"]
    assert (never["status"], never["outcome"], never["error"]["type"]) == ("failed", "judge_failure", "JudgeFailed")
    assert "reward" not in never


async def test_engine_errors_and_limits_have_outcomes_of_their_own(buffer: Any, write_rows: WriteRows) -> None:
    rows = write_rows(*({"instance_id": name, "prompt": name} for name in ("500", "400", "long")))
    samples = await run(buffer, rows, max_attempts=1)
    outcomes = {name: (sample["outcome"], sample.get("reward")) for name, sample in samples.items()}
    assert outcomes == {"500": ("engine_failure", None), "400": ("agent_failure", None), "long": ("truncated", 1.0)}
    assert samples["500"]["error"]["type"] == openai.InternalServerError.__name__


async def test_what_no_reward_function_can_be_given_is_a_failure_of_one_rollout(
    buffer: Any, write_rows: WriteRows
) -> None:
    async def rollout(client: Any, messages: Any, params: Any) -> Any:
        if client.rollout.instance_id == "bad":
            client.rollout.for_reward["judge"] = lambda: 1.0
        return await single_turn(client, messages, params)

    rows = write_rows({"instance_id": "bad", "prompt": "q"}, {"instance_id": "good", "prompt": "q"})
    samples = await run(buffer, rows, rollout, max_attempts=1)
    assert samples["good"]["outcome"] == "ok"
    assert samples["bad"]["outcome"] == "agent_failure"
    assert "function is not a JSON value" in samples["bad"]["error"]["message"]


async def test_what_a_rollout_leaves_open_is_closed_after_its_reward(buffer: Any, write_rows: WriteRows) -> None:
    events: list[str] = []

    async def rollout(client: Any, messages: Any, params: Any) -> Any:
        client.rollout.at_end.callback(events.append, f"closed {client.rollout.attempt}")
        client.rollout.at_end.callback(int, "not tidy")
        client.rollout.for_reward["folder"] = "kept"
        if not client.rollout.attempt:
            raise EnvironmentFailed("once")
        return await single_turn(client, messages, params)

    async def reward(item: dict[str, Any]) -> float:
        events.append(item["folder"])
        return 1.0

    samples = await run(buffer, write_rows({"instance_id": "a", "prompt": "q"}), rollout, reward)
    assert events == ["closed 0", "kept", "closed 1"]
    assert samples["a"]["outcome"] == "ok"


class Told:
    """A recorded trajectory with forks, as a gateway tells of one."""

    def __init__(self, *texts: str) -> None:
        self.counters = {"forked": 2, "realigned": 0}
        self._texts = texts

    def sample_fields(self) -> list[dict[str, Any]]:
        arrays = {"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -0.5]}
        question = {"role": "user", "content": "q"}
        return [{"messages": [question, {"role": "assistant", "content": text}], **arrays} for text in self._texts]


async def forking(client: Any, messages: Any, params: Any) -> Any:
    client.rollout.trajectory = Told("sub-agent", "compacted", "main")
    return await single_turn(client, messages, params)


async def test_forks_are_sent_before_the_main_sample_with_its_reward(buffer: Any, write_rows: WriteRows) -> None:
    await run(buffer, write_rows({"instance_id": "a", "prompt": "q", "label": "4"}), forking)
    first, second, main = buffer.samples
    assert [sample.get("fork") for sample in buffer.samples] == [1, 2, None]
    assert [sample["messages"][-1]["content"] for sample in buffer.samples] == ["sub-agent", "compacted", "4"]
    shared = ("instance_id", "epoch", "slot", "rollout_id", "reward", "outcome", "status", "attempt")
    assert all(fork[name] == main[name] for fork in (first, second) for name in shared)
    assert (main["reward"], main["outcome"], first["tokens"]) == (1.0, "ok", [1, 2])
    assert first["uid"].startswith(f"{main['uid']}-f1-")
    assert first["uid"].rpartition("-")[2] == second["uid"].rpartition("-")[2] == main["rollout_id"].rpartition("-")[2]
    assert main["extra_info"]["capture"] == {"forked": 2}
    assert first["extra_info"]["label"] == "4"


async def test_a_rollout_without_a_reward_sends_no_forks(buffer: Any, write_rows: WriteRows) -> None:
    async def judge(item: dict[str, Any]) -> float:
        raise JudgeFailed("no verdict")

    await run(buffer, write_rows({"prompt": "q"}), forking, judge, max_attempts=1)
    assert [(sample["outcome"], "fork" in sample) for sample in buffer.samples] == [("judge_failure", False)]


async def test_slimes_own_buffer_gets_no_forks(buffer: Any, write_rows: WriteRows) -> None:
    await run(buffer, write_rows({"prompt": "q"}), forking, url=buffer.root_url)
    assert [sample.get("fork") for sample in buffer.samples] == [None]


async def test_a_fork_that_the_buffer_refuses_fills_no_slot(buffer: Any, write_rows: WriteRows) -> None:
    buffer.refused = lambda sample: {"code": "invalid_input", "message": "no"} if sample.get("fork") == 1 else None
    await run(buffer, write_rows({"prompt": "q"}), forking)
    assert [(sample.get("fork"), sample["status"]) for sample in buffer.samples] == [
        (2, "completed"),
        (None, "completed"),
    ]


def test_every_failure_but_a_cancelled_rollout_has_a_budget() -> None:
    failures = {outcome for outcome in RolloutOutcome if outcome.value.endswith("_failure")}
    assert set(BUDGETED) == failures
