"""Discovery as a user meets it: real files, inspected in real child processes."""

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from forebay.core.clock import ManualClock
from forebay.core.errors import GeneratorBroken, UnknownTaskType
from forebay.generators.discovery import files
from forebay.generators.discovery.catalog import RECHECK_FAILED_S, Catalog
from forebay.generators.discovery.info import GeneratorInfo, InspectionPending
from forebay.generators.discovery.inspector import inspect_file

GOOD = "TASK_TYPE = {task_type!r}\n\ndef run_rollout(data):\n    pass\n"


class Place:
    """A working directory with a generators folder and a catalog over it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "generators"
        self.folder.mkdir(parents=True)

    def write(self, name: str, text: str = "", *, task_type: str = "mine") -> Path:
        path = self.folder / name
        path.write_text(text or GOOD.format(task_type=task_type))
        return path

    def catalog(self, *given: Path, timeout_s: float = 60.0, clock: ManualClock | None = None) -> Catalog:
        return Catalog(given, working_dir=self.root, inspect_timeout_s=timeout_s, clock=clock)

    async def verdict(self, path: Path, *given: Path, timeout_s: float = 60.0) -> GeneratorInfo:
        async with self.catalog(*given, timeout_s=timeout_s) as catalog:
            return {info.path: info for info in await catalog.scan()}[path]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Without the built-in generators, whose imports take seconds."""
    nothing = tmp_path / "packaged"
    nothing.mkdir()
    monkeypatch.setattr(files, "PACKAGED_FOLDER", nothing)
    return Place(tmp_path)


@pytest.fixture
def place_with_built_ins(tmp_path: Path) -> Place:
    return Place(tmp_path)


async def test_a_file_dropped_into_generators_is_found_and_never_imported_here(place: Place) -> None:
    path = place.write("dropped_in_generator.py")
    async with place.catalog() as catalog:
        info = await catalog.resolve("mine", wait_s=None)
        assert catalog.cached()
    assert (info.path, info.status, info.source, info.task_type) == (path, "ok", "user", "mine")
    assert "dropped_in_generator" not in sys.modules
    assert not list(place.folder.glob("__pycache__"))


async def test_a_folder_or_a_file_of_any_name_can_be_given(place: Place, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "one_generator.py").write_text(GOOD.format(task_type="one"))
    named = tmp_path / "my.own-task.py"
    named.write_text(GOOD.format(task_type="two"))
    async with place.catalog(Path("elsewhere"), named) as catalog:
        assert (await catalog.resolve("one", wait_s=None)).path == elsewhere / "one_generator.py"
        assert (await catalog.resolve("two", wait_s=None)).path == named


async def test_a_file_reached_by_two_ways_counts_once(place: Place) -> None:
    path = place.write("twice_generator.py")
    (place.folder / "link_generator.py").symlink_to(path)
    info = await place.verdict(path, place.folder, path)
    assert info.status == "ok"


async def test_a_file_with_another_name_is_skipped_and_not_run(place: Place, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    text = f"open({str(ran)!r}, 'w')\n" + GOOD.format(task_type="mine")
    path = place.write("my_task.py", text)
    place.write("helper.py", "SIZE = 3\n")
    async with place.catalog() as catalog:
        infos = {info.path: info for info in await catalog.scan()}
        with pytest.raises(UnknownTaskType, match=r"my_task\.py: skipped: name; rename it") as refusal:
            await catalog.resolve("mine", wait_s=None)
    assert infos[path].status == "skipped"
    assert infos[path].task_type == "mine"
    assert place.folder / "helper.py" not in infos
    assert str(path) in str(refusal.value)
    assert not ran.exists()


async def test_an_explicitly_given_file_is_not_skipped_for_its_name(place: Place) -> None:
    path = place.write("my_task.py")
    assert (await place.verdict(path, path)).status == "ok"


WRONG = [
    ("def run_rollout(data): pass\n", "TASK_TYPE is missing", "rename the file"),
    ("TASK_TYPE = 3\ndef run_rollout(data): pass\n", "TASK_TYPE is 3", "make it a non-empty string"),
    ("TASK_TYPE = {}\n", "run_rollout is missing", "define run_rollout(data)"),
    ("TASK_TYPE = {}\nrun_rollout = 4\n", "run_rollout is a int", "make it a function"),
    ("TASK_TYPE = {}\ndef run_rollout(): pass\n", "cannot be called with one argument", "run_rollout(data)"),
    ("TASK_TYPE = {}\nimport no_such_thing\n", "No module named 'no_such_thing'", "install it for"),
    ("TASK_TYPE = {}\nfrom slime_plugins.a import b\n", "No module named 'slime_plugins'", "forebay.generators.base"),
    ("TASK_TYPE = {}\nfrom . import b\n", "relative import", "import absolutely"),
    ("TASK_TYPE = {}\n\n1 / 0\n", "ZeroDivisionError: division by zero", "fix line 3 of "),
    ("TASK_TYPE = {}\ndef f(:\n", "SyntaxError", "fix line 2"),
    ("TASK_TYPE = {}\nraise SystemExit(4)\n", "SystemExit: 4", "fix line 2"),
    ("TASK_TYPE = {}\nprint('bye')\nimport os\nos._exit(4)\n", "code 4) after printing 'bye'", "into run_rollout"),
    ("TASK_TYPE = {}\nimport os\nos.kill(os.getpid(), 9)\n", "(Killed)", "into run_rollout"),
    ("TASK_TYPE = {}\ndef run_rollout(d): 0\ndef filter_itme(a, b): 0\n", "filter_itme", "filter_item"),
    (
        "TASK_TYPE = {}\ndef run_rollout(d): 0\ndef filter_item(): 0\n",
        "filter_item() cannot be called",
        "filter_item(item, task_type)",
    ),
]
"""Source (with a place for the task type), what is told of it, and what is advised."""


async def test_what_is_wrong_with_a_file_is_told_with_the_remedy(place: Place) -> None:
    for number, (text, _, _) in enumerate(WRONG):
        place.write(f"bad_{number}_generator.py", text.format(repr(f"task {number}")))
    place.write("good_generator.py", task_type="fine")
    async with place.catalog() as catalog:
        infos = {info.path.name: info for info in await catalog.scan()}
        assert (await catalog.resolve("fine", wait_s=None)).status == "ok"
        for number, (_, problem, remedy) in enumerate(WRONG):
            bad = infos[f"bad_{number}_generator.py"]
            assert bad.status == "failed"
            assert problem in bad.error
            assert remedy in bad.error
            with pytest.raises((GeneratorBroken, UnknownTaskType)) as refusal:
                await catalog.resolve(f"task {number}", wait_s=None)
            assert bad.error in str(refusal.value)
            assert isinstance(refusal.value, UnknownTaskType) == (number < 2)


async def test_an_unknown_task_type_names_the_known_ones_and_every_unusable_file(place: Place) -> None:
    place.write("good_generator.py", task_type="fine")
    broken = place.write("broken_generator.py", "TASK_TYPE = 'x'\nimport no_such_thing\n")
    async with place.catalog() as catalog:
        await catalog.scan()
        with pytest.raises(UnknownTaskType) as refusal:
            await catalog.resolve("y", wait_s=None)
    assert "fine" in refusal.value.known
    assert len([told for told in refusal.value.problems if told.startswith(f"{broken}: ModuleNotFoundError")]) == 1


async def test_a_traceback_starts_in_the_users_file(place: Place) -> None:
    path = place.write("bad_generator.py", "TASK_TYPE = 'x'\ndef deep():\n    return {}['gone']\ndeep()\n")
    info = await place.verdict(path)
    assert "KeyError: 'gone'" in info.traceback
    assert "in deep" in info.traceback
    assert "forebay" not in info.traceback.replace(str(place.root), "")


async def test_what_a_file_prints_does_not_reach_the_answer(place: Place) -> None:
    noisy = 'import os, sys\nprint(\'{"problems": ["no"]}\')\nos.write(1, b"\\x00" * 300000)\nsys.stdout.close()\n'
    path = place.write("noisy_generator.py", noisy + GOOD.format(task_type="mine"))
    assert (await place.verdict(path)).error == ""


async def test_a_file_that_hangs_or_leaves_threads_and_children_is_ended(place: Place, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    lasting = "import subprocess, threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
    lasting += f"open({str(pid_file)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
    path = place.write("lasting_generator.py", lasting + GOOD.format(task_type="mine"))
    assert (await place.verdict(path)).status == "ok"
    _assert_gone(int(pid_file.read_text()))
    hung = place.write("lasting_generator.py", "TASK_TYPE = 'mine'\n" + lasting + "time.sleep(600)\n")
    info = await place.verdict(hung, timeout_s=5.0)
    assert info.error.startswith("importing it took longer than 5 s; move slow work")
    assert info.task_type == "mine"
    _assert_gone(int(pid_file.read_text()))


def _assert_gone(pid: int) -> None:
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=30)


async def test_two_user_files_with_one_task_type_are_both_unusable_and_both_named(place: Place) -> None:
    paths = [place.write("a_generator.py"), place.write("b_generator.py")]
    async with place.catalog() as catalog:
        with pytest.raises(GeneratorBroken) as refusal:
            await catalog.resolve("mine", wait_s=None)
    assert all(str(path) in str(refusal.value) for path in paths)


async def test_a_built_in_is_found_anywhere_and_a_users_file_replaces_it(place_with_built_ins: Place) -> None:
    place = place_with_built_ins
    async with place.catalog() as catalog:
        built_in = await catalog.resolve("math", wait_s=None)
        mine = place.write("other_generator.py", task_type="math")
        chosen = await catalog.resolve("math", wait_s=None)
        replaced = {info.path: info for info in catalog.cached()}[built_in.path]
    assert (built_in.source, built_in.imports_base, built_in.error) == ("built-in", True, "")
    assert (chosen.path, chosen.replaces) == (mine, built_in.path)
    assert (replaced.status, replaced.replaced_by) == ("skipped", mine)


async def test_an_edited_new_or_removed_file_is_picked_up(place: Place) -> None:
    path = place.write("a_generator.py", task_type="first")
    async with place.catalog() as catalog:
        before = await catalog.resolve("first", wait_s=None)
        path.write_text(GOOD.format(task_type="second"))
        after = await catalog.resolve("second", wait_s=None)
        with pytest.raises(UnknownTaskType):
            await catalog.resolve("first", wait_s=None)
        new = place.write("b_generator.py", task_type="third")
        assert (await catalog.resolve("third", wait_s=None)).path == new
        new.unlink()
        with pytest.raises(UnknownTaskType):
            await catalog.resolve("third", wait_s=None)
    assert before.sha256 != after.sha256


async def test_an_edited_sibling_counts_as_an_edit(place: Place) -> None:
    place.write("common.py", "NAME = 'one'\n")
    place.write("a_generator.py", "from common import NAME as TASK_TYPE\ndef run_rollout(data): pass\n")
    async with place.catalog() as catalog:
        await catalog.resolve("one", wait_s=None)
        place.write("common.py", "NAME = 'two'\n")
        assert (await catalog.resolve("two", wait_s=None)).status == "ok"


async def test_another_generator_in_the_folder_does_not_count_as_an_edit(place: Place) -> None:
    path = place.write("a_generator.py")
    before = await place.verdict(path)
    place.write("b_generator.py", task_type="other")
    assert (await place.verdict(path)).sha256 == before.sha256


async def test_an_edit_during_an_inspection_ends_that_inspection(place: Place, tmp_path: Path) -> None:
    started = tmp_path / "started"
    text = f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    path = place.write("slow_generator.py", "TASK_TYPE = 'slow'\n" + text)
    async with place.catalog() as catalog:
        await pending_until(catalog, started)
        path.write_text(GOOD.format(task_type="slow"))
        assert (await catalog.resolve("slow", wait_s=None)).status == "ok"
    _assert_gone(int(started.read_text()))


async def pending_until(catalog: Catalog, started: Path) -> None:
    """Ask for task type ``slow``, whose file hangs, until its process has written its id to ``started``."""
    for _ in range(600):
        with pytest.raises(InspectionPending):
            await catalog.resolve("slow", wait_s=0.1)
        if started.exists() and started.read_text():
            return
    pytest.fail("the file was never inspected")


async def test_an_unchanged_file_is_inspected_once_and_a_failed_one_again_later(place: Place, tmp_path: Path) -> None:
    log = tmp_path / "imports"
    count = f"open({str(log)!r}, 'a').write('x')\n"
    place.write("good_generator.py", count + GOOD.format(task_type="good"))
    clock = ManualClock()
    async with place.catalog(clock=clock) as catalog:
        for _ in range(3):
            await catalog.scan()
        clock.advance(RECHECK_FAILED_S)
        await catalog.scan()
        assert log.read_text() == "x"
        place.write("bad_generator.py", "TASK_TYPE = 'bad'\nimport installed_later\ndef run_rollout(data): pass\n")
        with pytest.raises(GeneratorBroken):
            await catalog.resolve("bad", wait_s=None)
        (tmp_path / "installed_later.py").touch()
        with pytest.raises(GeneratorBroken):
            await catalog.resolve("bad", wait_s=None)
        clock.advance(RECHECK_FAILED_S)
        assert (await catalog.resolve("bad", wait_s=None)).status == "ok"


async def test_a_slow_file_leaves_the_others_usable_and_its_own_verdict_pending(place: Place, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    wait = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    place.write("slow_generator.py", wait + GOOD.format(task_type="slow"))
    place.write("good_generator.py", task_type="good")
    async with place.catalog() as catalog:
        assert (await catalog.resolve("good", wait_s=30)).status == "ok"
        with pytest.raises(InspectionPending, match=r"slow_generator\.py"):
            await catalog.resolve("slow", wait_s=0.05)
        assert "slow" not in {info.task_type for info in catalog.cached()}
        gate.touch()
        assert (await catalog.resolve("slow", wait_s=None)).status == "ok"


async def test_leaving_the_catalog_ends_what_is_being_inspected(place: Place, tmp_path: Path) -> None:
    started = tmp_path / "started"
    text = f"import os, time\nopen({str(started)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    place.write("slow_generator.py", "TASK_TYPE = 'slow'\n" + text)
    async with place.catalog() as catalog:
        await pending_until(catalog, started)
    _assert_gone(int(started.read_text()))


async def test_a_missing_folder_is_told(place: Place) -> None:
    info = await place.verdict(place.root / "nowhere", Path("nowhere"))
    assert (info.status, info.error) == ("failed", "no such file or folder; create it, or correct --generators")


async def test_a_name_that_hides_pythons_own_module_is_refused(place: Place) -> None:
    path = place.write("json.py")
    assert "hides Python's own module 'json'; rename the file" in (await place.verdict(path, path)).error


async def test_a_file_with_a_very_long_expression_is_usable(place: Place) -> None:
    words = " + ".join(f'"word {number}"' for number in range(600))
    path = place.write("long_generator.py", f"WORDS = {words}\n{GOOD.format(task_type='mine')}")
    info = await place.verdict(path)
    assert (info.status, info.task_type) == ("ok", "mine")


async def test_contract_hooks_and_base_are_seen(place: Place) -> None:
    text = GOOD.format(task_type="b") + "def transform_group(group, task_type): return group\n"
    seen = await place.verdict(place.write("b_generator.py", text))
    assert (seen.contract, list(seen.hooks), seen.imports_base) == ("B", ["transform_group"], False)
    lazy = "TASK_TYPE = 'c'\ndef run_rollout(data):\n    from forebay.generators.base import BaseGenerator\n"
    assert (await place.verdict(place.write("c_generator.py", lazy))).imports_base
    assert seen.as_json()["path"] == str(place.folder / "b_generator.py")


async def test_the_built_in_generators_are_what_is_said_of_them_unseen(place_with_built_ins: Place) -> None:
    async with place_with_built_ins.catalog() as catalog:
        built_in = [info for info in await catalog.scan() if info.source == "built-in"]
    assert {"math", "tool"} <= {info.task_type for info in built_in}
    drafts = (replace(info, status="failed") for info in built_in)
    root = place_with_built_ins.root
    assert [await inspect_file(draft, working_dir=root, timeout_s=60) for draft in drafts] == built_in
