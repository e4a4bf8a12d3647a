"""Adapts links of the pages to the docs site. MkDocs loads this file as a hook (``mkdocs.yml``)."""

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<=\]\()(?P<target>[\w./-]+)(?=[)#])")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Point links at a folder to the README in it, which is the page that GitHub shows."""
    folder = Path(config["docs_dir"], page.file.src_uri).parent

    def with_readme(link: re.Match[str]) -> str:
        target = link["target"]
        return f"{target.rstrip('/')}/README.md" if (folder / target).is_dir() else target

    return LINK.sub(with_readme, markdown)
