"""A real Chromium, driven by Playwright: what its pages said, asked for and showed in windows is kept."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
AXE = Path(os.environ.get("FOREBAY_AXE", Path(__file__).parents[2] / ".venv" / "axe.min.js"))
expect.set_options(timeout=30_000)
OWN = ("file:", "data:", "blob:", "about:")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.browser)


class Tab:
    """One page, and what it did besides being drawn."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.messages: list[str] = []
        """Errors and warnings of the console, and exceptions."""
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        page.on("console", self._note_message)
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("dialog", self._note_dialog)

    def _note_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning", "assert"):
            self.messages.append(f"{message.text} {message.location.get('url')}")

    def _note_dialog(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def wait_for(self, condition: str) -> None:
        """Until a condition of JavaScript holds. Playwright's own wait would evaluate text, which pages forbid."""
        looking = f"""new Promise((done) => {{ const until = Date.now() + 30000;
            const look = () => ({condition}) || Date.now() > until ? done(!!({condition})) : setTimeout(look, 20);
            look(); }})"""
        assert self.page.evaluate(looking), condition

    def assert_quiet(self, own: str = "file:") -> None:
        """Nothing on the console, no window, and no request to anything but ``own``."""
        assert self.messages == []
        assert self.dialogs == []
        assert [url for url in self.requests if not url.startswith((own, *OWN))] == []

    def assert_accessible(self) -> None:
        """axe finds nothing."""
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        told = "({violations}) => violations.map((each) => [each.id, each.nodes.map((node) => node.html)])"
        found = self.page.evaluate(f"axe.run().then({told})")
        assert found == []


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = os.environ.get("FOREBAY_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert path, "there is no Chromium: apt-get install chromium"
    # It does not start as root with its sandbox.
    arguments = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(params=[{}], ids=[""])
def tab(chromium: Browser, request: pytest.FixtureRequest) -> Iterator[Tab]:
    """A tab with storage of its own; a test's parameters are those of Playwright's contexts."""
    context = chromium.new_context(viewport={"width": 1280, "height": 1000}, **request.param)
    context.set_default_timeout(30_000)
    yield Tab(context.new_page())
    context.close()
