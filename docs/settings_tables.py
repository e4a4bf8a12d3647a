"""Generate the tables of settings.md from the code: ``make docs``. A test compares them."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from field_texts import field_texts
from pydantic_core import PydanticUndefined

from forebay.core.run import RunSettings
from forebay.core.settings import Settings

PAGE = Path(__file__).parent / "settings.md"


def server_table() -> str:
    """The table of server settings, with variable, default and help."""
    rows = [
        (f"`{name}`", f"`FOREBAY_{name.upper()}`", _default(field), field.description or "")
        for name, field in Settings.model_fields.items()
    ]
    return _table(("setting", "variable", "default", "what it does"), rows)


def run_table() -> str:
    """The table of run settings, under the names used over HTTP."""
    texts = field_texts(RunSettings)
    rows = [
        (f"`{field.alias or name}`", _default(field), texts[name]) for name, field in RunSettings.model_fields.items()
    ]
    return _table(("field", "default", "what it does"), rows)


TABLES = {"server": server_table, "run": run_table}


def with_tables(page: str) -> str:
    """``page`` with each table between its markers replaced."""
    for name, make in TABLES.items():
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        head, _, rest = page.partition(begin)
        page = head + begin + make() + end + rest.partition(end)[2]
    return page


def _default(field: Any) -> str:
    if field.default_factory is not None:
        return "none"
    if field.default is PydanticUndefined:
        return "required"
    return "none" if field.default in (None, "") else f"`{field.default}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"{PAGE.name} is written\n")
