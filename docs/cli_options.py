"""Generate cli_options.md from the code: ``make docs``. A test compares them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from forebay.server.cli.command_line import app

PAGE = Path(__file__).parent / "cli_options.md"
COMMON = ("--url", "--token", "--json", "--help")
HEAD = f"""# Options of the command line

Every argument and option of every `forebay` command, as `--help` shows them. Look here for a name or
a default; [cli.md](cli.md) and [cli_analysis.md](cli_analysis.md) say what the commands do.

```
forebay start --help
```

`{"`, `".join(COMMON)}` are [the same for all commands](cli.md) and not listed. This page is generated
from the code.
"""


def commands(group: Any, name: str = "forebay") -> Iterator[tuple[str, Any]]:
    """Yield each command with its full name, sorted."""
    for child, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {child}")
        else:
            yield f"{name} {child}", command


def page() -> str:
    """Return the whole page."""
    text = HEAD
    root = typer.main.get_command(app)
    for name, command in commands(root):
        context = command.make_context(name, [], resilient_parsing=True)
        records = [each.get_help_record(context) for each in command.params if not set(each.opts) & set(COMMON)]
        summary = (command.help or "").partition("\n\n")[0].strip()
        text += f"\n## {name}\n\n{summary}\n"
        cells = [[cell.replace("|", r"\|").replace("  [", " [") for cell in record] for record in records if record]
        rows = [f"| `{option}` | {what} |\n" for option, what in cells]
        if rows:
            text += "\n| option | what it does |\n| --- | --- |\n" + "".join(rows)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE.name} is written\n")
