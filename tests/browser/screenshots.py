"""The images of docs/ui.md: a test makes each again, and finds out whether the docs show the page as it is."""

import json
import os
import zlib
from pathlib import Path

from tests.browser.conftest import Tab

IMAGES = Path(__file__).parents[2] / "docs" / "images"
OUTLINE = """[...document.querySelectorAll('main :is(h2, h3, dt, figcaption, th[scope=col])')]
    .map((node) => node.textContent.replace(/\\d[\\d.,]*/g, '#'))"""
KEY = b"Outline\0"
END_BYTES = 12
"""Of the chunk that ends a PNG file."""


def check_image(tab: Tab, name: str, image: bytes) -> None:
    """Compare a screenshot with docs/images/NAME.png, which it replaces with UPDATE_SCREENSHOTS=1.

    Pixels and heights depend on the fonts of the machine. The width does not; nor does the outline of the page, which
    a text chunk of the file keeps.
    """
    outline: list[str] = tab.page.evaluate(OUTLINE)
    assert outline
    file = IMAGES / f"{name}.png"
    if os.environ.get("UPDATE_SCREENSHOTS"):
        file.write_bytes(_with_outline(image, outline))
    remedy = "UPDATE_SCREENSHOTS=1 make test-browser makes the images of docs/ui.md again"
    assert file.exists(), remedy
    kept = file.read_bytes()
    assert (_width(kept), _outline(kept)) == (_width(image), outline), remedy


def _width(image: bytes) -> int:
    return int.from_bytes(image[16:20])


def _with_outline(image: bytes, outline: list[str]) -> bytes:
    text = b"tEXt" + KEY + json.dumps(outline).encode()
    chunk = (len(text) - 4).to_bytes(4) + text + zlib.crc32(text).to_bytes(4)
    return image[:-END_BYTES] + chunk + image[-END_BYTES:]


def _outline(image: bytes) -> list[str]:
    _, _, text = image[: -END_BYTES - 4].rpartition(KEY)
    found: list[str] = json.loads(text or "[]")
    return found
