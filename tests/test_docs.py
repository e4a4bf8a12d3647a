"""Everything that users can name in the code has its place in docs/, and what docs/ shows is so."""

import functools
import importlib
import re
import runpy
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import typer

from forebay import client
from forebay.core import errors
from forebay.core.errors import ForebayError
from forebay.core.group import DiscardReason
from forebay.core.settings import Settings
from forebay.hooks.specs import NOTIFICATIONS, READ_HOOKS
from forebay.server.app import create_api
from forebay.server.cli.command_line import app as cli
from forebay.server.findings import DISCARD_REASONS
from forebay.telemetry.analysis.causes.wording import ADVICE
from forebay.telemetry.metrics import COUNTERS, GAUGES
from forebay.telemetry.tracing.records import PHASES, SERVER_PHASES
from forebay.web.replies import ClientGone

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def pages(pattern: str) -> str:
    """The text of a page and of those that it was split into, as ``http_api*.md``."""
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob(pattern)))


def headings(pattern: str) -> str:
    return "\n".join(line for line in pages(pattern).splitlines() if line.startswith("#"))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Those of docs/ find each other as they do where they are run."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module


def test_the_tables_of_settings_are_those_of_the_code(script: Callable[[str], ModuleType]) -> None:
    assert script("settings_tables").with_tables(page("settings.md")) == page("settings.md"), "run `make docs`"


def test_the_reference_of_the_client_is_what_the_code_says(script: Callable[[str], ModuleType]) -> None:
    assert script("client_reference").page() == page("client.md"), "run `make docs`"


def test_the_options_of_commands_are_those_of_the_code(script: Callable[[str], ModuleType]) -> None:
    assert script("cli_options").page() == page("cli_options.md"), "run `make docs`"


def test_every_method_and_field_of_the_client_is_in_its_reference(script: Callable[[str], ModuleType]) -> None:
    assert script("client_reference").undocumented() == []
    told = page("client.md")
    assert [name for name in client.__all__ if f"### {name}\n" not in told and f"| `{name}` |" not in told] == []
    for kind in (client.BufferClient, client.AsyncBufferClient, client.SampleWriter, client.AsyncSampleWriter):
        public = [name for name in dir(kind) if not name.startswith("_")]
        missing = [
            each for each in public if f"#### {kind.__name__}.{each}\n" not in told and f"| `{each}` |" not in told
        ]
        assert missing == []
    for kind in (client.Batch, client.Group, client.RunStats, client.WeightUpdate):
        assert [each for each in kind.__annotations__ if f"| `{each}` | " not in told] == []


INTERNAL = ("forebay.server.", "forebay.gateway.dialects.")
"""What users import nothing from."""


def public_modules() -> list[str]:
    """The packages that offer names, and the modules that generator files import."""
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    paths = {name: ROOT.joinpath(*name.split(".")[1:], "__init__.py") for name in packages}
    paths |= {f"forebay.generators.{path.stem}": path for path in (ROOT / "generators").glob("[!_]*.py")}
    found = sorted(name for name, path in paths.items() if "\n__all__ =" in path.read_text(encoding="utf-8"))
    return [name for name in found if not name.startswith(INTERNAL)]


@pytest.mark.parametrize("module", public_modules())
def test_every_public_name_can_be_imported_and_is_in_a_page(module: str) -> None:
    names: dict[str, Any] = {}
    exec(f"from {module} import *", names)
    offered = importlib.import_module(module).__all__
    assert set(offered) == names.keys() - {"__builtins__"}
    code = "\n".join(re.findall(r"^```.*?^```|`[^`\n]+`", pages("*.md"), re.MULTILINE | re.DOTALL))
    assert [name for name in offered if not re.search(rf"\b{name}\b", code)] == []


def test_every_setting_has_a_sentence_of_help() -> None:
    assert [name for name, field in Settings.model_fields.items() if not (field.description or "").endswith(".")] == []


def routes() -> list[str]:
    paths = create_api().openapi()["paths"]
    return [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]


@pytest.mark.parametrize("route", routes())
def test_every_route_has_a_heading(route: str) -> None:
    assert f"`{route}`" in headings("http_api*.md")


def test_no_heading_names_a_route_that_is_not_there() -> None:
    named = re.findall(r"`((?:GET|POST|PUT|DELETE) [^`]+)`", headings("http_api*.md"))
    assert set(named) <= set(routes())


def error_classes(base: type[ForebayError] = ForebayError) -> Iterator[type[ForebayError]]:
    yield base
    for each in base.__subclasses__():
        yield from error_classes(each)


PUBLIC_ERRORS = [kind for kind in error_classes() if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", PUBLIC_ERRORS)
def test_every_error_has_a_row_with_its_code_and_status(kind: type[ForebayError]) -> None:
    assert f"| `{kind.code}` | {kind.status} | `{kind.__name__}` |" in page("http_api.md")
    assert kind.__name__ in (errors.__doc__ or "")


def test_errors_have_codes_of_their_own() -> None:
    codes = [kind.code for kind in PUBLIC_ERRORS]
    assert len(codes) == len(set(codes))
    assert not issubclass(ClientGone, ForebayError)


def cli_commands() -> list[str]:
    commands = runpy.run_path(str(DOCS / "cli_options.py"))["commands"]
    return [name for name, _ in commands(typer.main.get_command(cli))]


@pytest.mark.parametrize("command", cli_commands())
def test_every_command_has_a_heading(command: str) -> None:
    assert f"\n## {command}\n" in pages("cli*.md")


@pytest.mark.parametrize("hook", READ_HOOKS + NOTIFICATIONS)
def test_every_hook_has_a_heading(hook: str) -> None:
    assert f"\n## {hook}\n" in page("hooks.md")


@pytest.mark.parametrize("metric", [*COUNTERS, *GAUGES, "forebay_write_seconds", "forebay_read_seconds"])
def test_every_metric_has_a_row(metric: str) -> None:
    assert f"| `{metric}` |" in page("operations.md")


@pytest.mark.parametrize("cause", ADVICE)
def test_every_cause_of_a_finding_is_explained(cause: str) -> None:
    causes = page("profiling.md").partition("## Causes, and what to do")[2]
    assert any(line.startswith("| `") and f"`{cause}`" in line.split("|")[1] for line in causes.splitlines())


@pytest.mark.parametrize("phase", [*PHASES, *SERVER_PHASES])
def test_every_phase_is_explained(phase: str) -> None:
    rows = [line for line in page("profiling.md").splitlines() if line.startswith("| ")]
    assert any(f"`{phase}`" in row for row in rows)


def test_every_reason_for_a_discarded_group_is_explained() -> None:
    assert set(DISCARD_REASONS) == {reason.value for reason in DiscardReason}


PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md"), *ROOT.glob("examples/*/*.md")])


@functools.cache
def anchors(path: Path) -> set[str]:
    """What links to a heading of a page end with, as GitHub makes it."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    made: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", shown).strip().replace(" ", "-")
        found.add(f"{name}-{made[name]}" if made[name] else name)
        made[name] += 1
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", path.read_text(encoding="utf-8")):
        page_meant = path.parent / target if target else path
        assert target.startswith("https://") or page_meant.exists(), target
        if anchor and page_meant.suffix == ".md" and not target.startswith("https://"):
            assert anchor in anchors(page_meant), f"{target}#{anchor}"


def test_the_index_lists_every_page() -> None:
    linked = set(re.findall(r"\]\(([^/)]+\.md)\)", page("README.md")))
    assert linked == {path.name for path in DOCS.glob("*.md")} - {"README.md"}


def shell_lines() -> Iterator[Any]:
    for path in PAGES:
        for block in re.findall(r"^```(?:sh)?\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                if line.startswith("forebay "):
                    yield pytest.param(line.partition(" #")[0], id=f"{path.name}: {line.strip()[:60]}")


@pytest.mark.parametrize("line", list(shell_lines()))
def test_commands_that_pages_show_are_understood(line: str) -> None:
    words = [word for word in line.split()[1:] if word != "--help"]
    command: click.Command = typer.main.get_command(cli)
    context = click.Context(command, info_name="forebay")
    while isinstance(command, click.Group):
        name, command_found, words = command.resolve_command(context, words)
        assert command_found is not None, name
        command = command_found
    command.make_context("forebay", words)


@pytest.mark.parametrize(
    ("name", "least"), [("workers.md", 9), ("skip.md", 4), ("recordings.md", 1), ("recorded_engine.md", 3)]
)
def test_the_python_of_a_page_runs_and_is_so(name: str, least: int) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page(name), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= least
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, f"docs/{name}", "exec"), names)


_MAKE = re.compile(r"(?:^|`)make ([a-z-]+)", re.MULTILINE)
TARGETS = sorted({name for path in PAGES for name in _MAKE.findall(path.read_text(encoding="utf-8"))})


@pytest.mark.parametrize("target", TARGETS)
def test_make_targets_that_pages_name_are_there(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), target
