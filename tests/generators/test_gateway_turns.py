"""An agent's turns, as the gateway recorded them, in the time of its rollout."""

from forebay.generators.rollouts.gateway_turns import with_gateway_turns
from forebay.telemetry.tracing.attempt_trace import counts_of
from forebay.telemetry.tracing.records import TurnSummary

ENGINE = "http://engine:30000"


def turn(sampled: int = 5, finish_reason: str = "stop", **phases: int) -> TurnSummary:
    of_engine = {"engine": ENGINE, "prompt": 10, "cached": 4, "sampled": sampled, "finish_reason": finish_reason}
    return TurnSummary(t=0, d=sum(phases.values()), phases=phases, **of_engine)  # type: ignore[arg-type]


def test_turns_take_the_place_of_the_agents_time() -> None:
    phases = {"queue": 10, "environment": 100, "write": 5}
    turns = [turn(decode=30, tool=20), turn(decode=10)]
    assert with_gateway_turns(phases, turns) == {"queue": 10, "environment": 40, "decode": 40, "tool": 20, "write": 5}


def test_what_the_agents_own_code_measured_between_its_calls_stays() -> None:
    phases = {"environment": 50, "parse": 30}
    turns = [turn(decode=40, agent=40)]
    assert with_gateway_turns(phases, turns) == {"parse": 30, "decode": 40, "agent": 10}


def test_however_clocks_differ_the_phases_add_up() -> None:
    phases = {"environment": 50, "parse": 30}
    assert sum(with_gateway_turns(phases, [turn(decode=60, prefill=40)]).values()) == 80


def test_without_turns_nothing_changes() -> None:
    assert with_gateway_turns({"agent": 7}, []) == {"agent": 7}


def test_a_summary_counts_the_tokens_of_all_turns() -> None:
    counts = counts_of([turn(sampled=5), turn(sampled=8, finish_reason="length")])
    assert (counts["engine"], counts["prompt"], counts["cached"], counts["sampled"]) == (ENGINE, 20, 8, 13)
    assert counts["is_capped"]
