"""Runs with something to see: a healthy one, one that only discards, and one whose every text is hostile."""

import random

from forebay.telemetry.visible_text import visible
from tests.kit import NativeRun, ServerProcess, make_group, make_sample, write_generator

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script> \x1b[2J \u202eevil\u2066 javascript:alert(3)"
SHOWN = visible(HOSTILE)
FAILING = f"""
TASK_TYPE = "failing"
def run_rollout(data):
    raise RuntimeError({HOSTILE!r})
"""


def plant_learning(server: ServerProcess, name: str, seed: int, num_steps: int = 12) -> NativeRun:
    """A run whose reward and length rise, with dull groups between; the last groups are not read yet."""
    luck = random.Random(seed)
    run = server.start_run(name=name)
    number = 0
    for step in range(num_steps):
        for _ in range(6):
            rewards = [float(luck.random() < 0.2 + 0.06 * step) for _ in range(4)]
            text = "4" * luck.randint(50, 200 + 60 * step)
            messages = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": text}]
            made = make_group(f"{name}-{number}", rewards, weight_version=max(0, step - luck.randint(0, 2)))
            run.write(*({**sample, "messages": messages} for sample in made))
            number += 1
        run.client.put(f"{run.path}/weight_version", json={"weight_version": step}).raise_for_status()
        batch = run.read(num_groups=2, step=step, wait_s=0)
        if batch["batch_id"]:
            run.ack(batch)
    return run


def plant_dull(server: ServerProcess) -> NativeRun:
    """A run of which every group is discarded."""
    run = server.start_run(name="dull", group_size=2)
    for number in range(3):
        run.write(*make_group(f"dull-{number}", [1.0, 1.0]))
    run.read(num_groups=1, wait_s=0)
    return run


def plant_hostile(server: ServerProcess) -> NativeRun:
    """A run whose instances and errors are hostile; and one that failed with such a text."""
    write_generator(server.generators, FAILING, "failing_generator.py")
    server.client.post("/v1/runs", json={"task_type": "failing", "group_size": 2})
    run = server.start_run(name="hostile", group_size=2)
    run.write(*make_group(HOSTILE, [0.0, 1.0]))
    run.ack(run.take(num_groups=1))
    failed = {"status": "failed", "error": {"type": HOSTILE, "message": HOSTILE}, "reward": ...}
    run.write(*make_group(f"open {HOSTILE}", [1.0]), make_sample(uid="failed", instance_id=f"late {HOSTILE}", **failed))
    return run
