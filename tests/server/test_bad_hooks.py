"""Hooks that raise, answer nonsense, end their process or hang: each costs one group."""

import pytest

from tests.conftest import MakeServer
from tests.kit import ServerProcess, make_group, write_generator

FOR_EVER = 'def run_rollout(data):\n    __import__("threading").Event().wait()\n'
GOOD = [0.0, 1.0, 0.0, 1.0]


BAD_ANSWERS = {
    "raises": ("raise ValueError('no idea')", "ValueError: no idea"),
    "wrong": ("return 'yes'", "'yes'"),
    "exits": ("__import__('os')._exit(3)", "exit code 3"),
    "hangs": ("__import__('time').sleep(600)", "longer than 15 s"),
}
HOOKS = {
    "is_valid_group": ("group, min_size, task_type", "group[0]", "(len(group[1]) == 4, len(group[1]) == 4)"),
    "filter_item": ("item, task_type", "item['instance_id']", "True"),
    "normalize_group_data": ("batch", "batch[0]", "batch"),
    "pad_group_data": ("batch, group_size", "batch[0]", "batch"),
    "transform_group": ("group, task_type", "group[0]", "group"),
}


def hook_file(answer: str, hook: str) -> str:
    """A generator whose one hook misbehaves with the instance ``bad``."""
    parameters, instance_id, good = HOOKS[hook]
    return f"""
TASK_TYPE = "{answer}_{hook}"
def {hook}({parameters}):
    if {instance_id} == "bad":
        {BAD_ANSWERS[answer][0]}
    return {good}
{FOR_EVER}"""


CASES = [(answer, "is_valid_group") for answer in BAD_ANSWERS] + [("raises", hook) for hook in list(HOOKS)[1:]]
CASES += [("wrong", "normalize_group_data"), ("exits", "pad_group_data"), ("hangs", "transform_group")]


@pytest.fixture(scope="module")
def hook_server(module_servers: MakeServer, tmp_path_factory: pytest.TempPathFactory) -> ServerProcess:
    folder = tmp_path_factory.mktemp("tasks")
    for answer, hook in CASES:
        write_generator(folder, hook_file(answer, hook), f"{answer}_{hook}_generator.py")
    return module_servers(generators=folder, start_wait_s=60)


@pytest.mark.parametrize(("answer", "hook"), CASES)
def test_a_misbehaving_hook_costs_one_group_and_the_batch_goes_on(
    hook_server: ServerProcess, answer: str, hook: str
) -> None:
    limits = {"hook_time_limit_s": 15} if answer == "hangs" else {}
    run = hook_server.start_slime(f"{answer}-{hook}", f"{answer}_{hook}", **limits)
    for instance in ("good-1", "bad", "good-2"):
        run.write(*make_group(instance, GOOD))
    batch = run.fetch(batch_size=8)
    assert batch["success"] is True
    assert [row["instance_id"] for row in batch["data"]["data"]] == ["good-1"] * 4 + ["good-2"] * 4
    assert sorted(batch["data"]["meta_info"]["finished_groups"]) == ["bad", "good-1", "good-2"]
    [bad] = run.groups(state="discarded")
    assert (bad["instance_id"], bad["reason"]) == ("bad", "hook_failed")
    assert f"hook {hook} failed" in bad["detail"]
    assert BAD_ANSWERS[answer][1] in bad["detail"]
    assert ("Traceback" in bad["detail"]) == (answer == "raises")
    assert len(run.group(bad["group_id"])["samples"]) == 4
    run.stop()
