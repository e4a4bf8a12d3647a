"""Each image of docs/ui.md is made again by a test."""

import re
from pathlib import Path

from tests.browser.screenshots import IMAGES

PAGE = IMAGES.parent / "ui.md"


def test_each_image_of_the_page_in_the_docs_is_made_by_a_test() -> None:
    shown = set(re.findall(r"\(images/(ui_\w+)\.png\)", PAGE.read_text(encoding="utf-8")))
    tests = [file.read_text(encoding="utf-8") for file in Path(__file__).parent.glob("test_*.py")]
    made = {name for text in tests for name in re.findall(r'check_image\(tab, "(\w+)"', text)}
    assert shown == made == {file.stem for file in IMAGES.glob("ui_*.png")}
