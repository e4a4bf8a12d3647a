"""The docs site that ``make site`` has built."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytestmark = pytest.mark.site

SITE = Path(__file__).parents[1] / "build" / "site"


class LoadedAddresses(HTMLParser):
    """The addresses that a browser loads when it opens a page; links that a reader follows are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        name = "href" if tag == "link" else "src"
        self.found += [value for key, value in attrs if key == name and value]


def is_external(address: str) -> bool:
    return address.startswith("//") or "://" in address


def test_opening_a_page_loads_nothing_from_elsewhere() -> None:
    pages = list(SITE.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        loaded = LoadedAddresses()
        loaded.feed(page.read_text())
        assert loaded.found
        assert [address for address in loaded.found if is_external(address)] == [], page


def test_a_style_sheet_loads_nothing_from_elsewhere() -> None:
    sheets = list(SITE.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        addresses = re.findall(r"url\([\"']?([^)\"']+)|@import\s+[\"']([^\"']+)", sheet.read_text())
        assert [url or imported for url, imported in addresses if is_external(url or imported)] == [], sheet
