"""The words of findings: what happened, where, and what to do, for somebody who is tired."""

from forebay.telemetry.analysis.report import EventPath
from forebay.telemetry.numbers import seconds_text

ADVICE = {
    "long_answer": "Lower max_tokens, or wait for fewer requests: the what-if table says what either saves.",
    "slow_rate": "Look at the load of that engine at that time, and at what else runs on its GPU.",
    "stalled_engine": "Look into that engine's log at that time: it gave nothing, idle or busy with something else.",
    "queue": "More rollouts at once (num_process), or more room in the buffer or at the engine, would shorten it.",
    "engine_away": "Unless the run had just begun to look for its engines: a crash or a restart, in that engine's log.",
    "hold": "The trainer had paused the engines or not yet announced its weights.",
    "tool": "Give the tool a timeout, or make it faster.",
    "reward": "Look at what the reward is given: a whole response where its end would do, a pattern that backtracks.",
    "reward_queue": "Reward workers were busy, or starting: more of them (num_reward_workers), or a faster reward.",
    "blocked_loop": "Meanwhile no rollout of the process moved: await what blocks it, or run that in a thread.",
    "agent": "It is the agent's own code between two calls: put `span()` around its parts.",
    "write": "Look at the disk of the buffer.",
    "late_trainer": "Generation is not what the step waits for: a faster trainer would shorten it.",
    "barrier": "Spread requests by how long they take, not by their number.",
    "gap": "Look into that engine's log at that time.",
    "over_sampling": "Start fewer surplus requests, or keep partial rollouts for the next step.",
    "discarded": "`forebay status RUN` tells why: tasks that are too easy, or too hard, give `invalid` groups.",
    "hooks": "Look at the group hooks: they are on the way of every reply.",
    "delivery": "Look at the size of the replies and at the network to the trainer.",
    "constant_phase": "It does not depend on what is generated: do it once, when the data set is built.",
    "slow_step": "Compare it with the steps around it.",
}
"""By cause: what to do."""
CAP_ADVICE = "A higher cap of the scheduler breaks fewer."
"""In place of what is said of over-sampling, where most of it was broken at a cap."""

_HAPPENED = {
    "slow_rate": "got its tokens {seconds} slower than that engine gives them to others",
    "stalled_engine": "waited {seconds} for an engine that gave nothing",
    "queue": "waited {seconds} in a queue ({phase})",
    "engine_away": "waited {seconds} for an engine that answers ({phase})",
    "hold": "was held {seconds} for the trainer's weights or paused engines",
    "tool": "spent {seconds} more on tools than its like ({phase})",
    "reward": "spent {seconds} more on its reward than its like",
    "reward_queue": "waited {seconds} for a worker to compute its reward",
    "blocked_loop": "stood {seconds} with a blocked event loop",
    "agent": "spent {seconds} more in the agent's own code than its like ({phase})",
    "write": "waited {seconds} until its sample was on the buffer's disk",
}


def happened(cause: str, seconds: float, phase: str, tokens: float, usual_tokens: float) -> str:
    """What a request did, for whom ``cause`` is the reason that it took so much longer."""
    if cause == "long_answer":
        return f"answered with {tokens:,.0f} tokens where {usual_tokens:,.0f} are usual: {seconds_text(seconds)} more"
    return _HAPPENED[cause].format(seconds=seconds_text(seconds), phase=phase)


def subject(path: EventPath, num_turns: int = 0) -> str:
    """``Request 7f (group g, worker 0) in turn 2 of 2``: turns are counted from 1, as people do."""
    where = [f"group {path.group}"] if path.group else []
    where += [f"worker {path.worker}"] if path.worker else []
    text = f"request {path.request}" + (f" ({', '.join(where)})" if where else "")
    if path.turn is not None and num_turns > 1:
        text += f" in turn {path.turn + 1} of {num_turns}"
    return text


def sentence(step: str, text: str, cause: str, advice: str = "") -> str:
    """``Step 67: …. What to do.``"""
    return f"Step {step}: {text}. {advice or ADVICE[cause]}"
