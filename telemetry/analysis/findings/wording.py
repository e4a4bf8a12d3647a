"""The texts of findings: what happened, where, and what to do. Written for a tired reader."""

from forebay.telemetry.analysis.report import EventPath
from forebay.telemetry.numbers import seconds_text

ADVICE = {
    "long_answer": "Lower max_tokens, or wait for fewer requests: the what-if table shows what either saves.",
    "slow_rate": "Check the load of that engine at that time, and what else runs on its GPU.",
    "stalled_engine": "Check that engine's log at that time: it was idle, or busy with something else.",
    "queue": "Run more rollouts at once (num_process), or allow more in the buffer or at the engine.",
    "engine_away": "Check that engine's log for a crash or restart, unless the run had just begun to look for it.",
    "hold": "The trainer had paused the engines or not yet announced its weights.",
    "tool": "Give the tool a timeout, or make it faster.",
    "reward": "Check the reward's input: a whole response where its end would do, or a pattern that backtracks.",
    "reward_queue": "Reward workers were busy or starting: use more (num_reward_workers), or a faster reward.",
    "blocked_loop": "No rollout of the process moved meanwhile: await the blocking code, or run it in a thread.",
    "agent": "This is the agent's own code between two calls: put `span()` around its parts.",
    "write": "Check the disk of the buffer.",
    "late_trainer": "The step does not wait for generation: a faster trainer would shorten it.",
    "barrier": "Distribute requests by how long they take, not by their number.",
    "gap": "Check that engine's log at that time.",
    "over_sampling": "Start fewer surplus requests, or keep partial rollouts for the next step.",
    "discarded": "`forebay status RUN` shows why: tasks that are too easy or too hard give `invalid` groups.",
    "hooks": "Check the group hooks: every reply waits for them.",
    "delivery": "Check the size of the replies and the network to the trainer.",
    "constant_phase": "It does not depend on what is generated: do it once, when the data set is built.",
    "slow_step": "Compare it with the steps around it.",
}
"""What to do, by cause."""
CAP_ADVICE = "A higher cap of the scheduler would stop fewer attempts."
"""Replaces the advice on over-sampling if most of the loss is from attempts stopped at a cap."""

_HAPPENED = {
    "slow_rate": "got its tokens {seconds} slower than other requests get them from that engine",
    "stalled_engine": "waited {seconds} for an engine that produced nothing",
    "queue": "waited {seconds} in a queue ({phase})",
    "engine_away": "waited {seconds} for an engine to become available ({phase})",
    "hold": "waited {seconds} for the trainer's weights or paused engines",
    "tool": "spent {seconds} more on tools than comparable requests ({phase})",
    "reward": "spent {seconds} more on its reward than comparable requests",
    "reward_queue": "waited {seconds} for a worker to compute its reward",
    "blocked_loop": "was delayed {seconds} by a blocked event loop",
    "agent": "spent {seconds} more in the agent's own code than comparable requests ({phase})",
    "write": "waited {seconds} until its sample was on the buffer's disk",
}


def happened(cause: str, seconds: float, phase: str, tokens: float, usual_tokens: float) -> str:
    """Describes what made a request take longer, given its ``cause``."""
    if cause == "long_answer":
        return f"answered with {tokens:,.0f} tokens (usually {usual_tokens:,.0f}): {seconds_text(seconds)} longer"
    return _HAPPENED[cause].format(seconds=seconds_text(seconds), phase=phase)


def subject(path: EventPath, num_turns: int = 0) -> str:
    """``Request 7f (group g, worker 0) in turn 2 of 2``: turns are numbered from 1 for people."""
    where = [f"group {path.group}"] if path.group else []
    where += [f"worker {path.worker}"] if path.worker else []
    text = f"request {path.request}" + (f" ({', '.join(where)})" if where else "")
    if path.turn is not None and num_turns > 1:
        text += f" in turn {path.turn + 1} of {num_turns}"
    return text


def sentence(step: str, text: str, cause: str, advice: str = "") -> str:
    """``Step 67: …. What to do.``"""
    return f"Step {step}: {text}. {advice or ADVICE[cause]}"
