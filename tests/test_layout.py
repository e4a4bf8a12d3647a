"""The folders are the packages, and nothing reaches them by a bare name."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]
NOT_PACKAGES = {"tests", "examples", "docs", "build", "dist", "my_tasks"}

FOLDERS = sorted(
    folder.relative_to(ROOT)
    for top in ROOT.iterdir()
    if top.is_dir() and not top.name.startswith(".") and top.name not in NOT_PACKAGES
    for folder in [top, *(path for path in top.rglob("*") if path.is_dir())]
    if "__pycache__" not in folder.parts and any(folder.glob("*.py"))
)


def test_every_folder_with_code_is_a_listed_package() -> None:
    assert sorted(SETUPTOOLS["packages"]) == sorted(f"forebay.{'.'.join(folder.parts)}" for folder in FOLDERS)


def test_every_top_folder_is_mapped_into_the_namespace() -> None:
    tops = {folder.parts[0] for folder in FOLDERS}
    assert SETUPTOOLS["package-dir"] == {f"forebay.{top}": top for top in tops}
    assert set(PROJECT["tool"]["importlinter"]["root_packages"]) == {f"forebay.{top}" for top in tops}


def test_the_makefile_links_every_top_folder_for_the_type_checker() -> None:
    makefile = (ROOT / "Makefile").read_text()
    listed = next(line for line in makefile.splitlines() if line.startswith("PACKAGES :="))
    assert set(listed.split()[2:]) == {folder.parts[0] for folder in FOLDERS}


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_every_package_is_typed_and_says_what_it_is(folder: Path) -> None:
    assert (ROOT / folder.parts[0] / "py.typed").exists()  # holds for the packages below it
    assert (ROOT / folder / "__init__.py").read_text().startswith('"""')


def test_no_folder_is_named_after_a_module_of_the_standard_library() -> None:
    assert [str(folder) for folder in FOLDERS if folder.name in sys.stdlib_module_names] == []


def test_the_namespace_itself_has_no_code() -> None:
    assert not (ROOT / "__init__.py").exists()
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.usefixtures("everything_imported")
def test_no_folder_was_imported_by_its_bare_name() -> None:
    bare = {folder.parts[0] for folder in FOLDERS}
    found = {name for name in sys.modules if name.partition(".")[0] in bare}
    ours = {name for name in found if str(getattr(sys.modules[name], "__file__", "")).startswith(f"{ROOT}/")}
    assert ours == set()


@pytest.fixture
def everything_imported() -> None:
    import forebay.server.app
    import forebay.server.cli.command_line  # noqa: F401 - they import the rest


def test_the_server_never_loads_what_only_users_code_needs() -> None:
    heavy = "{'torch', 'transformers', 'math_verify', 'openai', 'ray', 'cloudpickle', 'plotly', 'opentelemetry.sdk'}"
    code = f"import sys, forebay.server.app; found = {heavy} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


def test_what_asks_over_http_need_not_load_what_draws_in_terminals() -> None:
    code = "import sys; from forebay.core.child_process import skip_httpx_command; skip_httpx_command()"
    code += "; import forebay.client.calls.async_transport, forebay.generators.base"
    code += "; found = {'rich', 'click'} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", f"{code}; assert not found, found"], check=True, timeout=60)


def test_test_files_have_names_of_their_own() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_no_file_is_too_long_to_be_read() -> None:
    sizes = {path: len(path.read_text().splitlines()) for folder in FOLDERS for path in (ROOT / folder).glob("*.py")}
    assert {str(path): size for path, size in sizes.items() if size > 400} == {}


MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))
NAMED = [path for path in MODULES if path.stem not in ("__init__", "__main__")]
NAMES = [str(path.relative_to(ROOT)) for path in NAMED]


def test_no_folder_is_a_crowd() -> None:
    sizes = Counter(str(Path(name).parent) for name in NAMES)
    assert {folder: size for folder, size in sizes.items() if size > 22} == {}


def test_a_module_name_stands_for_one_file_of_its_package() -> None:
    """The dialects of the gateway apart, which are built alike."""
    places = Counter((name.split("/")[0], Path(name).stem) for name in NAMES if "/dialects/" not in name)
    assert {place: number for place, number in places.items() if number > 1} == {}


def classes_of(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    return [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]


def test_a_class_name_stands_for_one_class() -> None:
    names = Counter(name for path in MODULES for name in classes_of(path))
    assert {name: number for name, number in names.items() if number > 1} == {}


CORE_TREES = ("core", "buffer", "hooks", "web")
CORE_FOLDERS = ("server", "server/routes", "server/runs", "server/tracing", "telemetry/tracing")
"""What a maintainer of the buffer reads: docs/architecture.md begins with it."""


def test_a_maintainer_of_the_buffer_reads_at_most_30_000_lines() -> None:
    page = (ROOT / "docs/architecture.md").read_text().partition("**What you can ignore**")[0]
    assert [folder for folder in (*CORE_TREES, *CORE_FOLDERS) if f"`{folder}/`" not in page] == []
    paths = [path for top in CORE_TREES for path in (ROOT / top).rglob("*.py")]
    paths += [path for folder in CORE_FOLDERS for path in (ROOT / folder).glob("*.py")]
    assert sum(len(path.read_bytes().splitlines()) for path in paths) <= 30_000


BESIDE = (
    "workers.groups",
    "workers.simulator.scenario",
    "replay.skip",
    "replay.recording",
    "telemetry.analysis.report",
)


@pytest.mark.parametrize("module", BESIDE)
def test_what_stands_beside_the_buffer_needs_no_server(module: str) -> None:
    code = f"import sys, forebay.{module}; sys.exit('forebay.server' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)


SHORT = {
    "core/fields.py": "flags in a payload, and what is wrong with a field, for every layer that reads one",
    "core/tasks.py": "the one set of tasks, from hooks to the server",
    "engines/capture/teacher.py": "what a user's sample_arrays calls",
    "engines/read_json.py": "one error for what an engine made up, from its chats to its list of workers",
    "engines/tiny/extra.py": "the error for a missing extra, before anything of it is imported",
    "gateway/spec.py": "the first message to the gateway's process, all that the server imports of the gateway",
    "generators/math_generator.py": "a user reads and copies it",
    "replay/engine/pytest_plugin.py": "what pytest loads in every session, without an engine",
    "replay/substitutes.py": "the one rule of repeat, for whatever is numbered",
    "server/cli/demo/child.py": "a main",
    "server/ui/search.py": "one route, whose indexes the services hold",
    "telemetry/visible_text.py": "the one rule of what may reach a terminal, from the log to pages and tables",
}
"""Modules below 40 lines, and why each of them is one."""


def test_short_modules_have_a_reason() -> None:
    short = {name for path, name in zip(NAMED, NAMES, strict=True) if len(path.read_text().splitlines()) < 40}
    assert short == set(SHORT)


STARTS_PROCESSES = {
    "core/processes/child_link.py": "every child that exchanges messages with its parent",
    "generators/environments/harbor_process.py": "Harbor's environment without a container, which has namespaces",
    "generators/environments/child_tree.py": "a child with another Python, none of whose processes it leaves behind",
    "generators/process/monitor.py": "the run process, which its monitor outlives",
    "generators/rewards.py": "processes of reward functions, which die with the session of the run",
    "generators/sandbox/__init__.py": "the supervisor of a sandboxed command",
    "generators/sandbox/supervisor.py": "the command, within its limits",
    "server/cli/demo/children.py": "the engine and the server of the demo",
    "workers/backends/processes.py": "workers of a group, which any thread may call",
}
"""Modules that start processes, and which. A new one talks over core/processes, or says here why it cannot."""
DEFINES_A_FORMAT = {
    "buffer/store/index.py": "SQLite: the index of the journal",
    "buffer/store/index_damage.py": "SQLite: reading an index that is damaged",
    "buffer/store/index_queries.py": "SQLite: reading the index beside its writer",
    "core/binary_sample.py": "a sample on the wire",
    "core/parts.py": "parts of samples on the wire",
    "core/processes/child_link.py": "messages between parent and child",
    "core/processes/parent_link.py": "messages between parent and child",
    "core/records/log_records.py": "records: the journal, recordings, cassettes",
    "core/records/record_file.py": "records: the journal, recordings, cassettes",
    "core/safetensors_format.py": "safetensors",
    "generators/environments/child_main.py": "messages of a child whose Python lacks Forebay",
    "generators/rewards.py": "messages with processes of reward functions, as multiprocessing has them",
    "replay/skip/verl.py": "verl's dumps",
    "server/search/text_index.py": "SQLite: a temporary file",
    "telemetry/trace_db.py": "SQLite: a temporary file",
    "web/http_protocol.py": "what the kernel says of a connection",
    "workers/backends/channel.py": "calls of workers in processes",
    "workers/backends/wire.py": "arguments and results of calls of workers",
    "workers/rollouts/orders.py": "rollouts that run in workers",
}
"""Modules that pack, pickle or connect to SQLite, and for what."""
READS_TRACES = {
    "server/routes/exports.py": "lines as they are",
    "server/tracing/trace_upkeep.py": "sums for /metrics, of two kinds of lines",
    "telemetry/trace_db.py": "everything: reports, exports, the simulator",
    "telemetry/tracing/read_trace.py": "defines the lines",
    "workers/scheduling/history.py": "summaries alone, of gigabytes of spans",
}
"""Modules that read the lines of traces. Others ask a ``TraceDB``."""
MAX_PROTOCOLS, MAX_MODULES = 36, 663
"""They may only fall, unless a commit says why not."""

_STARTS = re.compile(r"(Popen|create_subprocess_\w+|get_context|posix_spawn|os\.fork)\(")
_FORMAT = re.compile(r"struct\.Struct\(|msgpack\.\w+\(|(?:cloud)?pickle\.\w+\(|pickle\.Unpickler|sqlite3\.connect\(")
_TRACES = re.compile(r"(bounded_lines|decode_line)\(")
_PROTOCOL = re.compile(r"^class \w+(?:\[\w+\])?\((?:.*\b)?Protocol(?:\[.*\])?\):", re.MULTILINE)


@pytest.mark.parametrize(
    ("pattern", "listed"), [(_STARTS, STARTS_PROCESSES), (_FORMAT, DEFINES_A_FORMAT), (_TRACES, READS_TRACES)]
)
def test_one_thing_is_done_in_the_modules_that_are_listed(pattern: re.Pattern[str], listed: dict[str, str]) -> None:
    found = {str(path.relative_to(ROOT)) for path in MODULES if pattern.search(path.read_text())}
    assert found == set(listed)


def test_protocols_and_modules_do_not_grow_in_number() -> None:
    assert sum(len(_PROTOCOL.findall(path.read_text())) for path in MODULES) <= MAX_PROTOCOLS
    assert len(MODULES) <= MAX_MODULES


OUT_OF_USE = {"told", "desk", "outlet", "fruitless", "keeping", "condemned", "express", "settle", "settled"}
"""Words for which the documentation has others: a reply, a payload, a message; store, rank, drain."""


def bound_names(path: Path) -> Iterator[str]:
    """Every name that a file gives to something."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.split(r"_|(?<=[a-z0-9])(?=[A-Z])", name)}


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_names_are_words_of_the_documentation(folder: Path) -> None:
    found = {
        f"{path.name}: {name}"
        for path in (ROOT / folder).glob("*.py")
        for name in (path.stem, *bound_names(path))
        if words_of(name) & OUT_OF_USE
    }
    assert found == set()


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_a_folder_shows_the_map_of_its_modules(folder: Path) -> None:
    page = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text())) or ""
    shown = set(re.findall(r"\w+", page))
    modules = {path.stem for path in (ROOT / folder).glob("*.py")} - {"__init__", "__main__"}
    folders = {path.parent.name for path in (ROOT / folder).glob("*/__init__.py")}
    assert (modules | folders) - shown == set()


@pytest.mark.parametrize("module", ["forebay.generators.base", "forebay.hooks.host"])
def test_what_is_loaded_with_every_run_waits_for_no_pydantic(module: str) -> None:
    code = f"import sys, {module}; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
