"""The texts of findings: what happened, where, and what to do. Written for a tired reader."""

from collections.abc import Sequence

from forebay.telemetry.analysis.causes.engine_book import SlowEngine
from forebay.telemetry.analysis.report import EventPath, Finding, StepSummary
from forebay.telemetry.numbers import seconds_text, share_text

ADVICE = {
    "slow_engine": "Check what else runs on that engine's GPU, its clock and its load; until then, send it less.",
    "cold_cache": "Send the turns of a conversation to one engine, and check that engine's prefix cache.",
    "network": "Check the network and the proxies between the run and that engine.",
    "long_answer": "Lower max_tokens, or wait for fewer requests: the what-if table shows what either saves.",
    "slow_rate": "Check the load of that engine at that time, and what else runs on its GPU.",
    "stalled_engine": "Check that engine's log at that time: it was idle, or busy with something else.",
    "queue": "Run more rollouts at once: raise num_process.",
    "admission": "Let more groups into the buffer, or read more often.",
    "engine_queue": "Send that engine fewer calls at once, or add an engine.",
    "engine_away": "Check that engine's log for a crash or restart, unless the run had just begun to look for it.",
    "hold": "The trainer had paused the engines or not yet announced its weights.",
    "tool": "Give the tool a timeout, or make it faster.",
    "starting": "Put `span()` around what the rollout does before its first call.",
    "group": "Samples wait for the rest of their group: defer fewer groups, or cap the longest rollouts.",
    "reward": "Check the reward's input: a whole response where its end would do, or a pattern that backtracks.",
    "reward_queue": "Reward workers were busy or starting: use more (num_reward_workers), or a faster reward.",
    "blocked_loop": "No rollout of the process moved meanwhile: await the blocking code, or run it in a thread.",
    "agent": "This is the agent's own code between two calls: put `span()` around its parts.",
    "write": "Check the disk of the buffer.",
    "failures": "Fix what raised: each failed attempt runs again from the start.",
    "nothing_delivered": "`forebay status RUN` shows the errors, and why groups were discarded.",
    "late_trainer": "The step does not wait for generation: a faster trainer would shorten it.",
    "small_reads": "Read more groups at once: raise num_groups of a read.",
    "barrier": "Distribute requests by how long they take, not by their number.",
    "shared_engines": "Give each run engines of its own, or let one run after the other.",
    "over_sampling": "Start fewer surplus requests, or keep partial rollouts for the next step.",
    "discarded": "`forebay status RUN` shows why: tasks that are too easy or too hard give `invalid` groups.",
    "hooks": "Check the group hooks: every reply waits for them.",
    "delivery": "Check the size of the replies and the network to the trainer.",
    "constant_phase": "It does not depend on what is generated: do it once, when the data set is built.",
    "slow_step": "Compare it with the steps around it.",
    "slowing": "Look for what accumulates: memory, a cache, open files, a log.",
}
"""What to do, by cause."""
CAP_ADVICE = "A higher cap of the scheduler would stop fewer attempts."
"""Replaces the advice on over-sampling if most of the loss is from attempts stopped at a cap."""

COST = "{seconds}"
"""Stands for the cost in a text, until it is known."""

_HAPPENED = {
    "slow_rate": "got its tokens {seconds} slower than other requests get them",
    "stalled_engine": "waited {seconds} for an engine that produced nothing",
    "queue": "waited {seconds} for a slot",
    "admission": "waited {seconds} for room in the buffer",
    "engine_queue": "waited {seconds} in the queue of its engine",
    "engine_away": "waited {seconds} for an engine to become available",
    "hold": "waited {seconds} for the trainer's weights or paused engines",
    "tool": "spent {seconds} more in {phase} than comparable requests",
    "starting": "spent {seconds} more before its first call than comparable requests",
    "group": "waited {seconds} for the rest of its group",
    "reward": "spent {seconds} on its reward",
    "reward_queue": "waited {seconds} for a worker to compute its reward",
    "agent": "spent {seconds} more in the agent's own code than comparable requests ({phase})",
    "write": "waited {seconds} until its sample was on the buffer's disk",
    "failures": "waited {seconds} before it was tried again",
}
_BY_ALL = "spent {seconds} in {phase}, as all requests do"


def happened(cause: str, phase: str, tokens: float, usual_tokens: float, *, is_by_all: bool = False) -> str:
    """Describes what made a request take longer, with ``COST`` for its seconds."""
    if cause == "long_answer":
        return f"answered with {tokens:,.0f} tokens (usually {usual_tokens:,.0f}): {COST} longer"
    return (_BY_ALL if is_by_all else _HAPPENED[cause]).replace("{phase}", phase)


def slow_engine_text(engine: str, slow: SlowEngine) -> str:
    """Compares an engine with the others, with ``COST`` for its seconds."""
    mine, others = seconds_text(slow.mine), seconds_text(slow.others)
    if slow.cause == "shared_engines":
        text = f"another run uses the same engines: calls take {slow.factor:.3g} times as long as at other times"
    elif slow.cause == "network":
        text = f"each call to engine {engine} takes {mine} outside the engine, where others take {others}"
    elif slow.part == "prefill":
        text = f"engine {engine} takes {mine} for the prompt of a call, where others take {others}"
        text += ", because less of it is in its prefix cache" if slow.cause == "cold_cache" else ""
    elif slow.cause == "stalled_engine":
        text = f"engine {engine} produced nothing for {mine}, for any of its calls"
    else:
        text = f"engine {engine} makes {_rate(slow.mine)} tokens/s per request, where others make {_rate(slow.others)}"
    if slow.grew > 1.15 and slow.cause == "slow_engine":
        text += f"; it slows down: its last calls take {share_text(slow.grew - 1)} longer than its first ones"
    return f"{text}: {COST} longer"


def _rate(s_per_token: float) -> str:
    return f"{1 / s_per_token:,.3g}" if s_per_token > 0 else "unknown"


def subject(path: EventPath, num_turns: int = 0) -> str:
    """``request 7f (group g, worker 0) in turn 2 of 2``: turns are numbered from 1 for people."""
    where = [f"group {path.group}"] if path.group else []
    where += [f"worker {path.worker}"] if path.worker else []
    text = f"request {path.request}" + (f" ({', '.join(where)})" if where else "")
    if path.turn is not None and num_turns > 1:
        text += f" in turn {path.turn + 1} of {num_turns}"
    return text


def of_step(summary: StepSummary, cause: str, seconds: float, text: str, path: EventPath, advice: str = "") -> Finding:
    """A finding about a step: ``Step 67: …. What to do.``"""
    path.step = summary.name
    share = seconds / summary.seconds if summary.seconds > 0 else 0.0
    whole = f"Step {summary.name}: {text}. {advice or ADVICE[cause]}"
    return Finding(cause=cause, seconds=seconds, share=share, sentence=whole, path=path)


def of_run(steps: Sequence[StepSummary], cause: str, seconds: float, text: str, event: str) -> Finding:
    """A finding about all ``steps``: ``…. What to do.``"""
    total_s = sum(step.seconds for step in steps)
    share = seconds / total_s if total_s > 0 else 0.0
    path, whole = EventPath(event=event), f"{text}. {ADVICE[cause]}"
    return Finding(cause=cause, seconds=seconds, share=share, share_of="run", sentence=whole, path=path)
