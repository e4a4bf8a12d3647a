"""A hook host that cannot be set up is tried again, but later and later."""

from pathlib import Path
from typing import Any

import pytest

from forebay.core.errors import HookFailed
from forebay.hooks import Sizes
from forebay.hooks.host_client import StartFailures
from tests.conftest import MakeServer
from tests.kit import make_group as make_samples
from tests.kit import write_generator

SIZES = Sizes(group_size=2, min_valid_group_size=2, min_valid_item_size=1)
NEEDS_A_DRIVER = """
import pathlib, sys, threading
TASK_TYPE = "driven"
TRIES, DRIVER = pathlib.Path({folder!r}) / "tries", pathlib.Path({folder!r}) / "driver"
if getattr(sys.modules["__main__"].__spec__, "name", "") == "forebay.hooks.host":
    with TRIES.open("a") as file:
        file.write("once\\n")
    if not DRIVER.exists():
        raise ImportError("no such driver")
def filter_item(item, task_type):
    return True
def run_rollout(data):
    threading.Event().wait()
"""


def test_the_wait_doubles_from_a_second_to_a_minute_and_ends_with_success() -> None:
    now_s = 100.0
    failures = StartFailures(lambda: now_s)
    failures.check()
    waits_s = []
    for _ in range(8):
        failures.note(HookFailed("file a.py", "no such driver", "the traceback"))
        began_s = now_s
        while is_held(failures):
            now_s += 0.5
        waits_s.append(now_s - began_s)
    assert waits_s == [1, 2, 4, 8, 16, 32, 60, 60]
    failures.clear()
    failures.note(HookFailed("file a.py", "again"))
    now_s += 1.0
    failures.check()


def is_held(failures: StartFailures) -> bool:
    try:
        failures.check()
    except HookFailed as error:
        return error.traceback == "the traceback"
    return False


async def test_the_file_is_loaded_again_once_its_time_has_come(
    make_runner: Any, make_group: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.hooks.host_client.FIRST_WAIT_S", 0.0)
    path = write_generator(tmp_path, NEEDS_A_DRIVER.format(folder=str(tmp_path)), "driven_generator.py")
    async with make_runner(path, user_hooks=["filter_item"]) as runner:
        with pytest.raises(HookFailed, match="no such driver"):
            await runner.process(make_group([0.0, 1.0]), SIZES)
        (tmp_path / "driver").touch()
        assert (await runner.process(make_group([0.0, 1.0]), SIZES)).num_kept == 2
    assert (tmp_path / "tries").read_text().split() == ["once"] * 2


def test_many_groups_of_a_file_that_cannot_be_loaded_cost_one_try(make_server: MakeServer, tmp_path: Path) -> None:
    source = NEEDS_A_DRIVER.format(folder=str(tmp_path))
    write_generator(tmp_path / "tasks", source, "driven_generator.py")
    server = make_server(generators=tmp_path / "tasks", start_wait_s=60)
    run = server.start_run("driven", group_size=2)
    for number in range(40):
        run.write(*make_samples(number, [0.0, 1.0]))
    assert run.read(num_groups=1)["batch_id"] is None
    discarded = run.groups(state="discarded")
    assert len(discarded) == 40
    assert {group["reason"] for group in discarded} == {"hook_failed"}
    assert all("ImportError: no such driver" in group["detail"] for group in discarded)
    assert all("Traceback" in group["detail"] for group in discarded)
    assert len((tmp_path / "tries").read_text().split()) <= 3, "a try takes a tenth of a second and more"
