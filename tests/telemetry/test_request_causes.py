"""Each cause of a request that took too long, and of a step, from a timeline."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from forebay.telemetry.analysis import analyse
from forebay.telemetry.analysis.causes.wording import ADVICE
from forebay.telemetry.analysis.report import Finding, ProfileReport
from forebay.telemetry.analysis.timeline import Event, ProfileStep, Request, Standstill, TurnTimes
from forebay.telemetry.tracing.read_trace import BadLines


class StepsInMemory:
    """A ``Timeline`` of steps that a test made."""

    def __init__(self, *steps: ProfileStep) -> None:
        self.source = "memory"
        self.problems = BadLines()
        self.notes: list[str] = []
        self._steps = steps

    def steps(self) -> Iterator[ProfileStep]:
        yield from self._steps


def request(place: int, engine_s: float = 10.0, tokens: int = 100, **phases: float) -> Request:
    """Of one turn; all begin at 0."""
    name = f"g{place // 4}/{place % 4}"
    end_s = engine_s + sum(phases.values())
    made = Request(name, f"e{place % 2}", 0.0, end_s, group=name.split("/", maxsplit=1)[0], sampled_tokens=tokens)
    made.phases = {"engine": engine_s, **phases}
    made.turns = [TurnTimes(0, 0.0, end_s, dict(made.phases), engine=made.worker, sampled_tokens=tokens)]
    at_s = 0.0
    for phase, seconds in made.phases.items():
        made.events.append(Event(phase, at_s, at_s + seconds, 0))
        at_s += seconds
    return made


def of_turns(place: int, *turns: tuple[int, float], fixed_s: float | None = None) -> Request:
    """Tokens and seconds of each turn; with ``fixed_s`` of an engine that tells what of the rest was decoding."""
    made = request(place, sum(seconds for _, seconds in turns), sum(tokens for tokens, _ in turns))
    made.turns = []
    at_s = 0.0
    for number, (tokens, seconds) in enumerate(turns):
        phases = {"engine": seconds} if fixed_s is None else {"engine": fixed_s, "decode": seconds - fixed_s}
        made.turns.append(TurnTimes(number, at_s, at_s + seconds, phases, engine=made.worker, sampled_tokens=tokens))
        at_s += seconds
    return made


def step_of(*requests: Request, **fields: object) -> ProfileStep:
    step = ProfileStep("7", 0.0, max(one.end_s for one in requests) + 1, requests=list(requests))
    for name, value in fields.items():
        setattr(step, name, value)
    return step


def alike(number: int = 16) -> list[Request]:
    """Their engines give 10 tokens a second; a hundred tokens, more or less."""
    return [request(place, 10 + place % 5 * 0.2, 100 + place % 5 * 2) for place in range(number)]


def report_of(step: ProfileStep) -> ProfileReport:
    return analyse(StepsInMemory(step))


def first(step: ProfileStep) -> Finding:
    return report_of(step).findings[0]


@pytest.mark.parametrize(
    ("phase", "cause"),
    [
        ("queue", "queue"),
        ("admission", "admission"),
        ("engine_queue", "engine_queue"),
        ("engine_wait", "engine_away"),
        ("retry", "failures"),
        ("group", "group"),
        ("starting", "starting"),
        ("tool", "tool"),
        ("environment", "tool"),
        ("reward", "reward"),
        ("reward_queue", "reward_queue"),
        ("agent", "agent"),
        ("parse", "agent"),
        ("hold", "hold"),
        ("write", "write"),
    ],
)
def test_the_cause_is_where_the_excess_was_spent(phase: str, cause: str) -> None:
    slow = request(16, **{phase: 60.0})
    report = report_of(step_of(*alike(), slow))
    (outlier,) = report.outliers
    assert (outlier.request, outlier.cause, outlier.cause_event) == (slow.request_id, cause, phase)
    finding = report.findings[0]
    assert finding.cause == cause
    assert finding.seconds == pytest.approx(60, rel=0.01)
    path = finding.path
    assert (path.step, path.worker, path.group, path.request, path.event) == ("7", "e0", "g4", "g4/0", phase)
    assert finding.sentence.startswith("Step 7: request g4/0 (group g4, worker e0)")
    assert "60 s" in finding.sentence
    assert finding.sentence.endswith(ADVICE[cause])
    assert [(event["name"], event["seconds"]) for event in outlier.events] == [("engine", 10.0), (phase, 60.0)]


def test_engine_time_is_judged_by_the_tokens_at_that_engine() -> None:
    """The engine e1 is three times as slow as e0, for all: none of its requests is an outlier for that.

    Nor is one that takes what its many tokens need, among durations that scatter.
    """
    requests = alike(16)
    for one in requests[1::2]:
        requests[requests.index(one)] = request(int(one.request_id[-1]) + 4 * int(one.request_id[1]), 30.0, 100)
    long = request(16, 80.0, 800)
    slow = request(18, 120.0, 100)
    report = report_of(step_of(*requests, long, slow))
    assert {outlier.request: outlier.cause for outlier in report.outliers} == {
        slow.request_id: "stalled_engine",
    }


def test_a_call_that_took_several_times_its_tokens_was_slow_and_many_times_was_stalled() -> None:
    assert first(step_of(*alike(), request(16, 50.0, 100))).cause == "slow_rate"
    assert first(step_of(*alike(), request(16, 120.0, 100))).cause == "stalled_engine"


def test_a_long_answer_names_its_tokens() -> None:
    finding = first(step_of(*alike(), request(16, 90.0, 900)))
    assert finding.cause == "long_answer"
    assert "answered with 900 tokens (usually 104)" in finding.sentence
    assert finding.seconds == pytest.approx(80, rel=0.05)


CALL_OF_TOOL = (73, 0.05)
"""An engine may say it in hardly any time, whatever its answers take."""


@pytest.mark.parametrize("fixed_s", [None, 0.04])
@pytest.mark.parametrize("tokens", [41, 81])
@pytest.mark.parametrize("cause", ["long_answer", "stalled_engine"])
def test_turns_of_another_kind_make_no_long_answer_slow_and_no_stall_long(
    cause: str, tokens: int, fixed_s: float | None
) -> None:
    """One line through calls of tools and answers is too flat where these have fewer tokens, too steep with more."""
    usual_s = 0.05 + 0.005 * tokens
    usual = [
        of_turns(place, CALL_OF_TOOL, (tokens, usual_s + place % 3 * 0.01), fixed_s=fixed_s) for place in range(22)
    ]
    planted = (1_201 if cause == "long_answer" else tokens, 6.05)
    finding = first(step_of(*usual, *(of_turns(place, CALL_OF_TOOL, planted, fixed_s=fixed_s) for place in (22, 23))))
    assert (finding.cause, finding.path.turn) == (cause, 1)
    assert finding.seconds == pytest.approx(6.05 - usual_s, rel=0.01)


def test_what_happens_to_the_few_that_come_to_a_turn_is_not_usual_there() -> None:
    usual = [of_turns(place, (100, 10.0)) for place in range(18)]
    few = [of_turns(place, (100, 10.0), (100, 120.0)) for place in range(18, 24)]
    finding = first(step_of(*usual, *few))
    assert (finding.cause, finding.seconds) == ("stalled_engine", pytest.approx(110))


@pytest.mark.parametrize(("fixed_s", "lengths"), [(None, range(40, 101, 5)), (0.5, [70])])
def test_what_every_call_takes_is_no_part_of_the_rate(fixed_s: float | None, lengths: Sequence[int]) -> None:
    """Half a second a call and a hundredth a token: 700 tokens need 7.5 s, where by the seconds of short answers for
    each of their tokens they would need 12. So most of 20.5 s was not their length."""
    usual = [
        of_turns(place, (tokens, 0.5 + 0.01 * tokens), fixed_s=fixed_s)
        for place, tokens in enumerate(list(lengths) * (26 // len(lengths)))
    ]
    long, slow = ((700, seconds) for seconds in (7.5, 20.5))
    finding = first(step_of(*usual, of_turns(26, long, fixed_s=fixed_s)))
    assert (finding.cause, finding.seconds) == ("long_answer", pytest.approx(7.5 - 1.2, rel=0.01))
    finding = first(step_of(*usual, of_turns(26, slow, fixed_s=fixed_s)))
    assert (finding.cause, finding.seconds) == ("slow_rate", pytest.approx(20.5 - 7.5, rel=0.01))


@pytest.mark.parametrize("number", [4, 5, 6, 10])
def test_among_a_few_answers_the_usual_ones_are_most_of_them(number: int) -> None:
    usual = [request(place, 10 + place % 3 * 0.1, 100 + place % 3) for place in range(number - 1)]
    finding = first(step_of(*usual, request(number - 1, 90.0, 900)))
    assert finding.cause == "long_answer"
    assert finding.seconds == pytest.approx(80, rel=0.01)
    finding = first(step_of(*usual, request(number - 1, 90.0, 100)))
    assert finding.cause == "stalled_engine"
    assert finding.seconds == pytest.approx(80, rel=0.01)


def test_where_all_answers_are_long_or_half_of_them_none_is_longer_than_its_like() -> None:
    for num_long in (16, 8):
        requests = [request(place, 90.0, 900) if place < num_long else request(place) for place in range(16)]
        assert report_of(step_of(*requests)).findings == []


def test_a_blocked_loop_is_told_apart_with_its_stack() -> None:
    requests = [request(place, 10.0, 100, agent=30.0) for place in range(15)] + [request(15, 10.0, 100, agent=30.0)]
    stall = Standstill("run", 10.0, 40.0, ["loop.py:5 run", "parse.py:12 wait"])
    report = report_of(step_of(*requests, standstills=[stall, Standstill("run", 12.0, 20.0)]))
    finding = report.findings[0]
    assert (finding.cause, finding.seconds) == ("blocked_loop", pytest.approx(30))
    assert "the event loop of the run process was blocked for 30 s, last in parse.py:12 wait" in finding.sentence


def test_a_request_that_a_blocked_loop_held_up_says_so() -> None:
    slow = request(16, 10.0, 100, agent=60.0)
    stall = Standstill("gateway", 10.0, 70.0, ["a.py:1 f"])
    report = report_of(step_of(*alike(), slow, standstills=[stall]))
    assert [finding.cause for finding in report.findings] == ["blocked_loop"]


def test_a_late_trainer_is_named_with_how_late_it_was() -> None:
    step = step_of(*alike(), asked_s=50.0, satisfied_s=50.0, end_s=51.0, ready_s={"g0": 9.0, "g1": 12.0})
    finding = first(step)
    assert finding.cause == "late_trainer"
    assert finding.seconds == pytest.approx(38)
    assert "the trainer asked 38 s after the last of its 2 groups was ready" in finding.sentence


def test_a_trainer_that_waited_was_not_late() -> None:
    step = step_of(*alike(), asked_s=5.0, satisfied_s=12.0, released_by="g1", ready_s={"g0": 9.0, "g1": 12.0})
    assert report_of(step).findings == []


def test_hooks_and_sending_are_named() -> None:
    step = step_of(*alike(), end_s=40.0, delivery_phases={"hooks": 20.0, "delivery": 5.0})
    assert [(finding.cause, finding.seconds) for finding in report_of(step).findings] == [
        ("hooks", 20),
        ("delivery", 5),
    ]


def test_milliseconds_are_no_finding_however_short_the_step() -> None:
    step = step_of(*(request(place, 0.1) for place in range(16)), end_s=0.3, delivery_phases={"hooks": 0.09})
    assert report_of(step).findings == []


def test_requests_of_one_cause_are_one_finding() -> None:
    slow = [request(place, tool=60.0 + place) for place in (16, 17, 18)]
    report = report_of(step_of(*alike(), *slow))
    (finding,) = report.findings
    assert (finding.path.request, finding.seconds) == (slow[-1].request_id, pytest.approx(78))


def test_what_was_thrown_away_is_no_outlier_and_what_hangs_is() -> None:
    gone, hung = request(16, tool=60.0), request(17, tool=70.0)
    gone.ending, gone.is_used = "aborted", False
    hung.ending = "open"
    report = report_of(step_of(*alike(), gone, hung))
    assert [outlier.request for outlier in report.outliers] == [hung.request_id]


def test_the_last_of_a_few_requests_is_explained() -> None:
    (finding,) = report_of(step_of(*alike(2), request(16, tool=60.0))).findings
    assert (finding.cause, finding.seconds) == ("tool", pytest.approx(60))


def at_engine(place: int, tokens: int, **phases: float) -> Request:
    """A request whose engine reports the parts of its call: ``engine`` is what lies outside the engine."""
    made = request(place, 0.0, tokens, **phases)
    del made.phases["engine"], made.turns[0].phases["engine"]
    if "outside" in phases:
        for parts in (made.phases, made.turns[0].phases):
            parts["engine"] = parts.pop("outside")
    made.events = [
        Event("engine" if event.name == "outside" else event.name, event.begin_s, event.end_s, 0)
        for event in made.events
        if event.end_s > event.begin_s
    ]
    return made


@pytest.mark.parametrize(
    ("slower", "cause", "text"),
    [
        ({"decode": 3.0}, "slow_engine", "engine e1 makes 2.5 tokens/s per request, where others make 10"),
        ({"prefill": 21.0}, "cold_cache", "takes 21 s for the prompt of a call, where others take 1 s, because less"),
        ({"outside": 11.0}, "network", "each call to engine e1 takes 12 s outside the engine, where others take 1 s"),
        ({"total": 11.0}, "network", "each call to engine e1 takes 12 s outside the engine, where others take 1 s"),
    ],
)
def test_an_engine_is_compared_with_the_others(slower: dict[str, float], cause: str, text: str) -> None:
    """``total``: of engines that report only how long a call took in all."""
    requests = []
    for place in range(16):
        tokens = 100 + place // 2
        parts = {"outside": 1.0, "prefill": 1.0, "decode": tokens / 10}
        if place % 2:
            parts["decode"] += slower.get("decode", 0.0) * tokens / 10
            parts["prefill"] += slower.get("prefill", 0.0) - ("prefill" in slower)
            parts["outside"] += slower.get("outside", 0.0) + slower.get("total", 0.0)
        made = at_engine(place, tokens, **parts)
        if "total" in slower:
            made.turns[0].engine_s = parts["prefill"] + parts["decode"]
            made.turns[0].phases = {"engine": made.duration_s}
        made.turns[0].prompt_tokens = 100
        made.turns[0].cached_tokens = 0 if place % 2 and "prefill" in slower else 90
        requests.append(made)
    step = step_of(*requests)
    (finding,) = report_of(step).findings
    assert (finding.cause, finding.path.worker) == (cause, "e1")
    assert text in finding.sentence
    usual_s = max(each.duration_s for each in requests[::2])
    assert finding.seconds == pytest.approx(max(each.duration_s for each in requests) - usual_s, rel=0.02)


def test_a_critical_path_through_a_tool_is_worth_a_finding_from_a_quarter_of_the_step(tmp_path: Path) -> None:
    def through_tools(seconds: float) -> list[str]:
        step = step_of(*[request(place, 10.0, 100, tool=seconds) for place in range(8)])
        return [finding.cause for finding in report_of(step).findings]

    assert through_tools(2.0) == []
    assert through_tools(10.0) == ["tool"]
