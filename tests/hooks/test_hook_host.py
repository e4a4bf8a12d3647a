"""A failing hook costs one group: real child processes that raise, hang, die, print and answer nonsense."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from forebay.core.errors import HookFailed
from forebay.hooks import Sizes, Verdict
from tests.kit import children_with, poll_until

SIZES = Sizes(group_size=2, min_valid_group_size=2, min_valid_item_size=1)
GOOD = [0.0, 1.0]
BAD = [0.5, 0.5]


def failing(statement: str) -> str:
    """A validity function that does ``statement`` for the group of equal rewards, and is content with others."""
    return f"""
    import os, sys, time
    def is_valid_group(group, n, task_type):
        if group[1][0]["reward"] == 0.5:
            {statement}
        return True, True
    """


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("raise KeyError('label')", "KeyError: 'label'"),
        ("return 1 / 0", "ZeroDivisionError"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("os._exit(3)", r"its process died \(exit code 3\)"),
        ("os.kill(os.getpid(), 11)", r"its process died \(signal 11\)"),
        ("return None", "it returned None"),
        ("return (True, False)", "is_finished to be true for a valid group"),
        ("return (True, True, True)", r"wanted: \(is_valid, is_finished\)"),
        ("return 'yes'", "it returned 'yes'"),
        ("raise ValueError(chr(0xd800))", "ValueError"),
        ("async def nothing(): raise LookupError('awaited')\n            return nothing()", "LookupError: awaited"),
    ],
)
async def test_a_failing_hook_costs_one_group_and_the_next_one_goes_on(
    make_file: Any, make_runner: Any, make_group: Any, statement: str, told: str
) -> None:
    async with make_runner(make_file(failing(statement))) as runner:
        assert (await runner.judge(make_group(GOOD), SIZES)).is_valid
        with pytest.raises(HookFailed, match=told) as caught:
            await runner.judge(make_group(BAD), SIZES)
        assert caught.value.hook == "is_valid_group"
        assert caught.value.traceback
        assert (await runner.judge(make_group(GOOD), SIZES)).is_valid


async def test_the_traceback_begins_in_the_users_file(make_file: Any, make_runner: Any, make_group: Any) -> None:
    path = make_file(failing("raise KeyError('label')"))
    async with make_runner(path) as runner:
        with pytest.raises(HookFailed) as caught:
            await runner.judge(make_group(BAD), SIZES)
    first_frame = caught.value.traceback.splitlines()[1]
    assert str(path) in first_frame
    assert "raise KeyError('label')" in caught.value.traceback


@pytest.mark.parametrize("statement", ["while True: pass", "time.sleep(3600)"])
async def test_an_endless_hook_is_killed_at_the_time_limit(
    make_file: Any, make_runner: Any, make_group: Any, statement: str
) -> None:
    async with make_runner(make_file(failing(statement)), time_limit_s=5.0) as runner:
        with pytest.raises(HookFailed, match=r"is_valid_group failed: it took longer than 5 s"):
            await runner.judge(make_group(BAD), SIZES)
        assert (await runner.judge(make_group(GOOD), SIZES)).is_valid
        assert runner.contract == "A"


PROCESS_FAILURES = [
    ("normalize_group_data(g): return None", "it returned None"),
    ("normalize_group_data(g): return g[1]", r"wanted: \(instance_id, items\)"),
    ("normalize_group_data(g): return str(g[0]), g[1]", "the instance_id 7 unchanged"),
    ("normalize_group_data(g): return True, g[1]", "the instance_id 7 unchanged"),
    ("normalize_group_data(g): return g[0], [1, 2]", "items that are dicts"),
    ("normalize_group_data(g): return g[0], [{'instance_id': 8}]", "instance_id 7 in each item"),
    ("normalize_group_data(g): g[1][0]['reward'] = float('nan'); return g", "rewards that are finite"),
    ("pad_group_data(g, n): g[1][0]['note'] = float('inf'); return g", "not plain JSON"),
    ("pad_group_data(g, n): g[1][0]['note'] = {1, 2}; return g", "not plain JSON"),
    ("pad_group_data(g, n): g[1][0]['note'] = g; return g", "not plain JSON"),
    ("filter_item(i, t): return 'no'", "wanted: a bool"),
    ("filter_item(i): return True", "TypeError"),
]


@pytest.mark.parametrize(("source", "told"), PROCESS_FAILURES)
async def test_nonsense_answers_name_the_hook_and_what_it_returned(
    make_file: Any, make_runner: Any, make_group: Any, source: str, told: str
) -> None:
    async with make_runner(make_file(f"def {source}")) as runner:
        with pytest.raises(HookFailed, match=told) as caught:
            await runner.process(make_group(GOOD), SIZES)
    assert caught.value.hook == source.partition("(")[0]


@pytest.mark.parametrize(
    ("answer", "told"), [("[]", "wanted: a dict"), ("{'mean': float('nan')}", "not plain JSON"), ("None", "None")]
)
async def test_meta_info_must_be_a_json_object(
    make_file: Any, make_runner: Any, make_group: Any, answer: str, told: str
) -> None:
    async with make_runner(make_file(f"def get_group_data_meta_info(d): return {answer}")) as runner:
        with pytest.raises(HookFailed, match=told):
            await runner.meta_info([make_group(GOOD)])


async def test_prints_go_to_the_log_and_never_into_the_answers(
    make_file: Any, make_runner: Any, make_group: Any, tmp_path: Path
) -> None:
    log = tmp_path / "hooks.log"
    source = """
    import os, subprocess, sys
    print("while loading")
    def is_valid_group(group, n, task_type):
        print("to stdout", flush=True)
        os.write(1, b"to descriptor 1\\n")
        subprocess.run(["echo", "from a child"], check=True)
        sys.stderr.write("to stderr\\n")
        return True, sys.stdin.read() == ""
    """
    async with make_runner(make_file(source), log_path=log) as runner:
        assert (await runner.judge(make_group(GOOD), SIZES)).is_finished
    written = log.read_text()
    assert all(
        text in written for text in ("while loading", "to stdout", "to descriptor 1", "from a child", "to stderr")
    )


async def test_a_file_that_cannot_be_loaded_is_told_for_each_group(
    make_file: Any, make_runner: Any, make_group: Any
) -> None:
    path = make_file("import sys\nif 'numbers' in sys.modules: raise ImportError('no such driver')")
    async with make_runner(path, user_hooks=["filter_item"]) as runner:
        for _ in range(2):
            with pytest.raises(HookFailed, match="ImportError: no such driver") as caught:
                await runner.process(make_group(GOOD), SIZES)
            assert caught.value.hook == "file task_generator.py"


async def test_loading_that_never_ends_is_told(make_file: Any, make_runner: Any, make_group: Any) -> None:
    path = make_file("import time\nif __name__ != 'builtins': time.sleep(3600)")
    async with make_runner(path, user_hooks=["filter_item"], start_limit_s=2.0) as runner:
        with pytest.raises(HookFailed, match="it took longer than 2 s"):
            await runner.process(make_group(GOOD), SIZES)


async def test_siblings_and_the_python_path_can_be_imported_and_classes_pickle(
    make_file: Any, make_runner: Any, make_group: Any, tmp_path: Path
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    (library / "far_helper.py").write_text("WORD = 'far'")
    (tmp_path / "near_helper.py").write_text("WORD = 'near'")
    source = """
    import pickle
    class Note: pass
    def is_valid_group(g, n, t):
        import near_helper, far_helper
        is_found = (near_helper.WORD, far_helper.WORD) == ("near", "far")
        return is_found, isinstance(pickle.loads(pickle.dumps(Note())), Note)
    """
    async with make_runner(make_file(source), python_path=[library]) as runner:
        verdict = await runner.judge(make_group(GOOD), SIZES)
    assert (verdict.is_valid, verdict.is_finished) == (True, True)
    assert "task_generator" not in sys.modules


async def test_a_cancelled_caller_leaves_the_host_in_step(make_file: Any, make_runner: Any, make_group: Any) -> None:
    calls: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()
    async with await asyncio.start_server(lambda _, writer: calls.put_nowait(writer), "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()
        busy = f"import socket; socket.create_connection({address}).recv(1); return False, True"
        async with make_runner(make_file(failing(busy))) as runner:
            waiting = asyncio.create_task(runner.judge(make_group(BAD), SIZES))
            in_the_hook = await calls.get()
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert waiting.cancelled()
            in_the_hook.write(b"!")
            assert (await runner.judge(make_group(GOOD), SIZES)).is_valid
            in_the_hook.close()
            await in_the_hook.wait_closed()


def test_the_host_works_under_uvloop(make_file: Any, make_runner: Any, make_group: Any) -> None:
    async def main() -> list[Verdict]:
        async with make_runner(make_file(failing("os._exit(3)"))) as runner:
            told = [await runner.judge(make_group(GOOD), SIZES)]
            with pytest.raises(HookFailed, match="exit code 3"):
                await runner.judge(make_group(BAD), SIZES)
            return [*told, await runner.judge(make_group(GOOD), SIZES)]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        assert [verdict.is_valid for verdict in loop.run(main())] == [True, True]


async def test_requests_from_many_readers_are_answered_each_its_own(
    make_file: Any, make_runner: Any, make_group: Any
) -> None:
    async with make_runner(make_file("def transform_group(g, t): return g\nCONTRACT = 'B'")) as runner:
        done = await asyncio.gather(*(runner.process(make_group([n / 40]), SIZES) for n in range(40)))
    assert [processed.rows[0].reward for processed in done] == [n / 40 for n in range(40)]


def host_processes() -> list[psutil.Process]:
    """Those of this process; servers of other tests have theirs."""
    return children_with(os.getpid(), "forebay.hooks.host")


async def test_what_a_hook_started_is_killed_with_the_host(
    make_file: Any, make_runner: Any, make_group: Any, tmp_path: Path
) -> None:
    source = f"""
    import subprocess, time
    def is_valid_group(g, n, t):
        child = subprocess.Popen(["sleep", "3600"])
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
        time.sleep(3600)
    """
    async with make_runner(make_file(source), time_limit_s=5.0) as runner:
        with pytest.raises(HookFailed, match="longer"):
            await runner.judge(make_group(GOOD), SIZES)
        pid = int((tmp_path / "pid").read_text())
        await asyncio.to_thread(poll_until, lambda: is_gone(pid))  # the kernel ends it a moment after the signal


async def test_a_forked_child_that_outlives_the_host_does_not_hold_up_the_answer(
    make_file: Any, make_runner: Any, make_group: Any
) -> None:
    statement = "os.fork() or time.sleep(3600); os._exit(4)"
    async with make_runner(make_file(failing(statement))) as runner:
        with pytest.raises(HookFailed, match="exit code 4"):
            async with asyncio.timeout(20):
                await runner.judge(make_group(BAD), SIZES)


async def test_leaving_the_runner_ends_the_host(make_file: Any, make_runner: Any, make_group: Any) -> None:
    async with make_runner(make_file("def is_valid_group(g, n, t): return True, True")) as runner:
        await runner.judge(make_group(GOOD), SIZES)
        assert len(host_processes()) == 1
    assert host_processes() == []


def test_the_host_dies_with_the_server_even_while_a_hook_is_busy(make_file: Any) -> None:
    path = make_file("""
    import os, time
    def is_valid_group(g, n, t):
        print("busy", os.getpid(), flush=True)
        time.sleep(3600)
    """)
    with subprocess.Popen([sys.executable, "-c", SERVER, str(path)], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        word, pid = server.stderr.readline().split()
        assert word == "busy"
        host = psutil.Process(int(pid))
        server.kill()
        host.wait(timeout=20)


SERVER = """
import asyncio, sys
from pathlib import Path
from forebay.hooks import HookInput, HookRunner, Sizes
from tests.kit import poll_until
async def bodies(): return [b'{"instance_id": 1, "reward": 1}']
async def main():
    async with HookRunner(task_type="t", module_path=Path(sys.argv[1]), user_hooks=["is_valid_group"]) as runner:
        await runner.judge(HookInput(1, [1.0], bodies), Sizes(1, 1, 1))
asyncio.run(main())
"""


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_host_that_cannot_be_started_is_told(
    make_file: Any, make_runner: Any, make_group: Any, tmp_path: Path
) -> None:
    path = make_file("def is_valid_group(g, n, t): return True, True")
    async with make_runner(path, log_path=path / "hooks.log") as runner:
        with pytest.raises(HookFailed, match="could not be started"):
            await runner.judge(make_group(GOOD), SIZES)
    async with make_runner(path, log_path=tmp_path / "new" / "hooks.log") as runner:
        assert (await runner.judge(make_group(GOOD), SIZES)).is_valid


async def test_a_first_answer_that_is_nonsense_decides_no_contract(
    make_file: Any, make_runner: Any, make_group: Any
) -> None:
    async with make_runner(make_file(failing("return 'yes'"))) as runner:
        with pytest.raises(HookFailed, match="it returned 'yes'"):
            await runner.judge(make_group(BAD), SIZES)
        assert runner.contract is None
        assert (await runner.judge(make_group(GOOD), SIZES)).is_valid
        assert runner.contract == "A"
