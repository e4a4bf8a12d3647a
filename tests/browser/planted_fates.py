"""For each reason to discard a group, a run with one group that was discarded for it."""

from collections.abc import Callable

from forebay.core.group import DiscardReason
from tests.kit import IDLE, NativeRun, ServerProcess, damage, make_group, write_generator

FILTERS = "def filter_item(item, task_type): return False"
SHORTENS = """
def transform_group(group, task_type): return group[0], group[1][:1]
def is_valid_group(group, min_valid_group_size, task_type): return True
"""
RAISES = 'def normalize_group_data(group): raise RuntimeError("it broke")'
FAILED = {"status": "failed", "error": {"type": "ConnectError", "message": "refused"}, "reward": None}
WRITTEN = make_group("one", [0.0, 1.0])


def read(run: NativeRun) -> NativeRun:
    run.read(num_groups=1, wait_s=0)
    return run


def with_hooks(server: ServerProcess, name: str, hooks: str) -> NativeRun:
    """A run of a generator file with these hooks, whose group was read."""
    write_generator(server.generators, IDLE.replace('"idle"', f'"{name}"') + hooks, f"{name}_generator.py")
    run = server.start_slime(name, name, group_size=2)
    run.write(*WRITTEN)
    run.fetch()
    return run


def timed_out(server: ServerProcess) -> NativeRun:
    run = server.start_run(group_size=2, group_timeout_seconds=0.3)
    run.write(WRITTEN[1])
    run.closed()
    return run


def invalid(server: ServerProcess) -> NativeRun:
    run = server.start_run(group_size=2)
    run.write(*make_group("one", [0.5, 0.5]))
    return read(run)


def failed(server: ServerProcess) -> NativeRun:
    run = server.start_run(group_size=2)
    run.write(*(sample | FAILED for sample in WRITTEN))
    return read(run)


def unreadable(server: ServerProcess) -> NativeRun:
    run = server.start_run(group_size=2)
    run.write(*make_group("one", [0.0, 1.0], note="to-be-damaged"))
    damage(server.data_dir, b"to-be-damaged")
    assert run.client.post(f"{run.path}/batches", json={"num_groups": 1}).status_code == 507
    return run


def stale(server: ServerProcess) -> NativeRun:
    run = server.start_run(group_size=2, max_staleness=1)
    run.write(*make_group("one", [0.0, 1.0], weight_version=1))
    run.client.put(f"{run.path}/weight_version", json={"weight_version": 5}).raise_for_status()
    return read(run)


def evaluated(server: ServerProcess) -> NativeRun:
    trained = server.start_run(group_size=2, evaluate={"tasks": {"exam": {}}})
    trained.write(*WRITTEN)
    trained.checkpoint(3, trained.read(num_groups=1, step=3))
    made = server.client.post(f"{trained.path}/evaluations", json={"task": "exam", "step": 3})
    assert made.is_success, made.text
    run = NativeRun(server, made.json()["run_id"])
    run.write(*WRITTEN)
    run.stop()
    return run


PLANTED: dict[DiscardReason, Callable[[ServerProcess], NativeRun]] = {
    DiscardReason.TIMED_OUT: timed_out,
    DiscardReason.INVALID: invalid,
    DiscardReason.FILTERED: lambda server: with_hooks(server, "filters", FILTERS),
    DiscardReason.INCOMPLETE: lambda server: with_hooks(server, "shortens", SHORTENS),
    DiscardReason.HOOK_FAILED: lambda server: with_hooks(server, "raises", RAISES),
    DiscardReason.FAILED: failed,
    DiscardReason.UNREADABLE: unreadable,
    DiscardReason.STALE: stale,
    DiscardReason.EVALUATED: evaluated,
}
