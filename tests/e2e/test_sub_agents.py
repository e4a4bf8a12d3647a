"""Rollouts of several conversations, from a run process to a trainer: forks, and outcomes of those that fail."""

from collections import defaultdict
from typing import Any

from tests.e2e.engines import GatedScript, scripted
from tests.e2e.payloads import numbered_rows
from tests.kit import Json, NativeRun, ServerProcess, poll_until

GROUP_SIZE = 4
NUM_ROWS = 3


def read_to_the_end(run: NativeRun) -> list[list[Json]]:
    """The rows of every group, which are acknowledged."""
    groups = []
    for _ in range(NUM_ROWS):
        batch = run.take(num_groups=1, wait_s=30)
        groups.append(batch["data"])
    return groups


def test_sub_agents_are_forks_and_failures_have_their_outcomes(server: ServerProcess, make_payload: Any) -> None:
    with scripted(GatedScript()) as engine:
        bad = [{"instance_id": "bad", "prompt": "p", "no_sandbox": True}, {"prompt": "p", "no_judge": True}]
        payload = make_payload(engine.url, [*numbered_rows(NUM_ROWS), *bad], max_attempts=1)
        del payload["num_repeat_per_sample"]
        run = server.start_run(**payload | {"task_type": "sub_agent", "group_size": GROUP_SIZE})
        groups = read_to_the_end(run)
        assert run.wait_for_state("finished")["outcomes"]["environment_failure"] == GROUP_SIZE
    view = poll_until(lambda: view if (view := run.view())["has_ended"] else {})
    assert (view["outcomes"]["judge_failure"], view["discarded"]) == (GROUP_SIZE, {"failed": 2})
    for rows in groups:
        by_rollout: dict[str, list[Json]] = defaultdict(list)
        for row in rows:
            by_rollout[row["rollout_id"]].append(row)
        assert len(by_rollout) == GROUP_SIZE
        for main, fork in by_rollout.values():
            assert (main.get("fork"), fork["fork"]) == (None, 1)
            assert (main["slot"], main["reward"]) == (fork["slot"], fork["reward"])
            assert main["messages"][1]["content"] == fork["messages"][-1]["content"], "both are of one execution"
            assert sum(main["loss_mask"]) > 0
            assert sum(fork["loss_mask"]) > 0
