"""Installed plugins: loaded in the hook host only, asked before the generator file, notified of events."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forebay.core.errors import HookFailed
from forebay.hooks import HookRunner, Sizes, run_hooks

SIZES = Sizes(group_size=2, min_valid_group_size=2, min_valid_item_size=1)
EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"


def run_with(site: Path, **settings: Any) -> HookRunner:
    return HookRunner(task_type="task", python_path=[site], time_limit_s=30, **settings)


async def test_a_plugin_replaces_built_in_behaviour_and_is_not_imported_here(
    install_plugin: Any, make_group: Any
) -> None:
    site = install_plugin(
        "halving",
        """
        @hookimpl
        def normalize_group_data(group):
            for item in group[1]:
                item["reward"] /= 2
            return group
        """,
    )
    async with run_with(site) as runner:
        assert runner.in_host("process")
        done = await runner.process(make_group([0.0, 1.0]), SIZES)
        assert [json.loads(row.body or b"")["reward"] for row in done.rows] == [0.0, 0.5]
        assert runner.implementations()["normalize_group_data"] == ["plugin halving", "built-in"]
    assert "halving" not in sys.modules


async def test_a_plugin_wraps_the_file_which_is_asked_before_the_built_in(
    install_plugin: Any, make_file: Any, make_group: Any
) -> None:
    site = install_plugin(
        "strict",
        """
        @hookimpl(wrapper=True)
        def is_valid_group(group):
            is_valid, is_finished = yield
            return is_valid and len(group[1]) > 2, is_finished
        """,
    )
    path = make_file("def is_valid_group(g, n, t): return True, True")
    async with run_with(site, module_path=path, user_hooks=["is_valid_group"]) as runner:
        verdicts = [await runner.judge(make_group([0.5] * num), SIZES) for num in (2, 3)]
        answering = runner.implementations()["is_valid_group"]
    assert [verdict.is_valid for verdict in verdicts] == [False, True]
    assert answering == ["plugin strict", "file task_generator.py", "built-in"]


async def test_none_from_a_plugin_leaves_the_question_to_the_next(install_plugin: Any, make_group: Any) -> None:
    site = install_plugin("silent", "@hookimpl\nasync def filter_item(item): return None")
    site = install_plugin("quiet", "@hookimpl\ndef filter_item(item): return None") or site
    async with run_with(site) as runner:
        with pytest.raises(HookFailed, match="filter_item"):  # a coroutine has answered before it says None
            await runner.process(make_group([0.0, 1.0]), SIZES)


async def test_plugins_that_only_listen_leave_the_groups_in_process(install_plugin: Any, make_group: Any) -> None:
    async def unread() -> list[bytes]:
        raise AssertionError("bodies were read")

    group = make_group([0.0, 1.0])
    group.bodies = unread
    async with run_with(install_plugin("listener", "@hookimpl\ndef run_ended(reason): ...")) as runner:
        assert (await runner.judge(group, SIZES)).is_valid
        assert not runner.in_host("judge")
        assert not runner.in_host("meta_info")
        assert (await runner.meta_info([group]))["avg_reward"] == 0.5


async def test_plugins_can_be_switched_off(install_plugin: Any) -> None:
    site = install_plugin("unwanted", "raise RuntimeError('loaded')")
    async with run_with(site, plugins=False) as runner:
        assert not runner.in_host("judge")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("raise RuntimeError('broken')", "plugin faulty failed: RuntimeError: broken"),
        ("@hookimpl\ndef filter_items(item): return True", "filter_items"),
        ("@hookimpl\ndef filter_item(sample): return True", "sample"),
    ],
)
async def test_a_plugin_that_cannot_be_used_is_named(
    install_plugin: Any, make_group: Any, source: str, told: str
) -> None:
    async with run_with(install_plugin("faulty", source)) as runner:
        with pytest.raises(HookFailed, match=told) as caught:
            await runner.judge(make_group([0.0, 1.0]), SIZES)
    assert caught.value.hook == "plugin faulty"


LISTENER = """
import json, sys
def told(**words): print(json.dumps(words), file=sys.stderr, flush=True)
@hookimpl
def run_started(run_id, task_type, name): told(run_id=run_id, task_type=task_type, name=name)
@hookimpl
def group_closed(instance_id, state, reason): told(instance_id=instance_id, state=state, reason=reason)
@hookimpl
async def batch_delivered(num_rows): told(num_rows=num_rows)
@hookimpl
def run_ended(reason):
    told(reason=reason)
    raise RuntimeError("after all")
"""


async def test_notifications_reach_a_plugin_in_order(
    install_plugin: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "hooks.log"
    monkeypatch.setattr(run_hooks, "_NOTIFY_GRACE_S", 60.0)  # it includes the start of the host
    async with run_with(install_plugin("listener", LISTENER), log_path=log) as runner:
        runner.notify("run_started", run_id="run-1", name=tmp_path, unheard_of=1)
        runner.notify("group_closed", run_id="run-1", instance_id=2**70, state="discarded", reason="timed_out")
        runner.notify("batch_delivered", run_id="run-1", num_rows=8)
        runner.notify("run_ended", run_id="run-1", reason="returned")
    assert [json.loads(line) for line in log.read_text().splitlines()] == [
        {"run_id": "run-1", "task_type": "task", "name": str(tmp_path)},
        {"instance_id": 2**70, "state": "discarded", "reason": "timed_out"},
        {"num_rows": 8},
        {"reason": "returned"},
    ]
    assert "RuntimeError: after all" in caplog.text


async def test_notify_never_blocks_and_never_raises(install_plugin: Any, caplog: pytest.LogCaptureFixture) -> None:
    recursive: dict[str, Any] = {}
    recursive["self"] = recursive
    source = "@hookimpl\ndef batch_delivered(num_rows): ..."
    async with run_with(install_plugin("listener", source)) as runner:
        runner.notify("run_started", name=recursive)
        for number in range(1_500):
            runner.notify("batch_delivered", num_rows=number)
    assert "run_started could not be encoded" in caplog.text
    assert "500 notifications were dropped" in caplog.text


async def test_nobody_listening_starts_no_host(make_file: Any) -> None:
    path = make_file("def filter_item(i, t): return True")
    async with HookRunner(task_type="task", module_path=path, user_hooks=["filter_item"], plugins=False) as runner:
        runner.notify("run_started", run_id="run-1")
        assert runner.implementations()["run_started"] == []


async def test_a_generator_file_may_mark_functions_and_listen_as_well(
    make_file: Any, make_runner: Any, make_group: Any, tmp_path: Path
) -> None:
    source = """
    from forebay.hooks import hookimpl
    @hookimpl
    def filter_item(task_type, item): return item["reward"] > 0 and task_type == "task"
    @hookimpl
    def run_started(run_id): print("heard of", run_id)
    """
    log = tmp_path / "hooks.log"
    async with make_runner(make_file(source), log_path=log) as runner:
        assert (await runner.process(make_group([0.0, 1.0]), SIZES)).num_kept == 1
        runner.notify("run_started", run_id="run-7")
    assert log.read_text() == "heard of run-7\n"


@pytest.fixture
def example_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder into which pip has installed the example, on the path of this process."""
    source, site = tmp_path / "plugin", tmp_path / "site"
    shutil.copytree(EXAMPLE, source)
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    quiet = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run([*install, "--target", str(site), str(source)], check=True, env=quiet)
    monkeypatch.syspath_prepend(str(site))
    return site


async def test_the_example_plugin_installs_and_drops_truncated_samples(
    example_site: Path, tmp_path: Path, make_group: Any
) -> None:
    log = tmp_path / "hooks.log"
    group = make_group([0.0, 1.0])
    bodies = [body.replace(b'"row": 1', b'"finish_reason": "length"') for body in await group.bodies()]

    async def truncated() -> list[bytes]:
        return bodies

    group.bodies = truncated
    async with run_with(example_site, log_path=log) as runner:
        assert (await runner.process(group, SIZES)).num_kept == 1
        runner.notify("group_closed", run_id="run-1", state="discarded", reason="filtered")
    assert "'filtered': 1" in log.read_text()
