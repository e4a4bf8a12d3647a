"""Every hook has its section in docs/hooks.md, with its arguments, and the example there works."""

import inspect
import re
from pathlib import Path
from typing import Any

import pluggy
import pytest

from forebay.hooks import Sizes, specs
from forebay.hooks.check import check_hooks

DOCS = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text()
HOOKS = [name for name, value in vars(specs).items() if hasattr(value, f"{specs.PROJECT}_spec")]


def section(hook: str) -> str:
    found = re.search(rf"^## {hook}$(.*?)(?=^## |\Z)", DOCS, re.MULTILINE | re.DOTALL)
    assert found, f"docs/hooks.md has no section '## {hook}'"
    return found[1]


def test_the_lists_of_hooks_are_the_specs() -> None:
    manager = pluggy.PluginManager(specs.PROJECT)
    manager.add_hookspecs(specs)
    assert sorted(HOOKS) == sorted(specs.READ_HOOKS + specs.NOTIFICATIONS)
    first_results = {name for name in HOOKS if getattr(manager.hook, name).spec.opts["firstresult"]}
    assert first_results == set(specs.READ_HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_section_with_its_arguments_and_an_example(hook: str) -> None:
    text = section(hook)
    for name in inspect.signature(getattr(specs, hook)).parameters:
        assert f"`{name}`" in text, f"{hook} does not mention {name}"
    assert "```python" in text
    assert "Called" in text


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_says_in_its_docstring_when_it_is_called(hook: str) -> None:
    assert "Called" in (inspect.getdoc(getattr(specs, hook)) or "")


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL))
def test_every_example_defines_hooks_without_problems(example: str) -> None:
    namespace: dict[str, Any] = {"__name__": "example"}
    exec(example, namespace)
    report = check_hooks(namespace)
    assert report.hooks
    assert report.problems == []


def test_the_sections_promise_what_the_sizes_hold() -> None:
    assert all(field in DOCS for field in Sizes.__dataclass_fields__)
