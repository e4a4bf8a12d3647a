"""The search page in a real browser: a planted reward hack, hostile texts, filters in the address."""

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Tab
from tests.browser.planted import HOSTILE, SHOWN
from tests.browser.screenshots import check_image
from tests.browser.test_ui import THEMES
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, make_sample

HACK = "sys.exit(0)"


def answer(number: int, slot: int, note: str) -> Json:
    """Of 5 rewarded answers, 2 have the hack, and none of the others."""
    is_rewarded = slot == 0
    tool = f"ran {HACK} {note}" if is_rewarded and number % 5 < 2 else f"passed {note}"
    messages = [
        {"role": "user", "content": f"Do not call {HACK}"},
        {"role": "assistant", "content": "I run the tests."},
        {"role": "tool", "content": tool},
        {"role": "assistant", "content": "Done."},
    ]
    name = f"task-{number}"
    return make_sample(uid=f"{name}/{slot}", instance_id=name, reward=float(is_rewarded), messages=messages)


@pytest.fixture(scope="module")
def hacked(module_servers: MakeServer) -> NativeRun:
    return plant(module_servers(), HOSTILE)


def plant(server: ServerProcess, note: str) -> NativeRun:
    run = server.start_run(name="hacked", group_size=2)
    run.write(*(answer(number, slot, note) for number in range(20) for slot in (0, 1)))
    return run


@pytest.mark.parametrize("tab", THEMES, indirect=True)
def test_a_reward_hack_is_found_with_its_share_of_the_rewards(tab: Tab, hacked: NativeRun) -> None:
    tab.page.goto(f"{hacked.server.url}/ui/#/runs/{hacked.run_id}")
    tab.page.get_by_role("link", name="Search what models").click()
    tab.page.get_by_label("Text").fill(HACK)
    tab.page.keyboard.press("Enter")
    expect(tab.page.get_by_text("In 8 of 40 samples (20 %). Mean reward: 1 with it, 0.375 without it.")).to_be_visible()
    expect(tab.page.locator("mark")).to_have_count(8)
    expect(tab.page.get_by_role("cell", name=f"ran {HACK} {SHOWN} Done.")).to_have_count(8)
    expect(tab.page.locator("footer code")).to_have_text(f"forebay show {hacked.run_id} --grep '(?i)sys\\.exit\\(0\\)'")
    assert "text=sys.exit" in tab.page.url
    tab.assert_accessible()
    tab.page.get_by_label("Reward at least").fill("1")
    tab.page.keyboard.press("Enter")
    expect(tab.page.get_by_text("In 8 of 20 samples (40 %)")).to_be_visible()
    tab.page.reload()
    tab.page.get_by_role("link", name="slot 0").first.click()
    expect(tab.page.get_by_role("heading", level=1)).to_have_text(re.compile("^Rollout task-16/0"))
    assert "min_reward=1" in tab.page.url
    tab.assert_quiet(hacked.server.url)


def test_the_image_of_the_docs_shows_the_search_as_it_is(tab: Tab, make_server: MakeServer) -> None:
    run = plant(make_server(), "in 0.2 s")
    tab.page.set_viewport_size({"width": 1100, "height": 440})
    tab.page.goto(f"{run.server.url}/ui/#/runs/{run.run_id}/search?text=sys.exit")
    expect(tab.page.locator("mark")).to_have_count(8)
    check_image(tab, "ui_search", tab.page.screenshot())


def test_a_text_that_is_too_short_or_missing_says_so(tab: Tab, hacked: NativeRun) -> None:
    tab.page.goto(f"{hacked.server.url}/ui/#/runs/{hacked.run_id}/search?text=sy")
    expect(tab.page.get_by_text("Enter at least 3 characters.")).to_be_visible()
    tab.page.get_by_label("Text").fill("nowhere to be found")
    tab.page.keyboard.press("Enter")
    expect(tab.page.get_by_text("No sample has this text.")).to_be_visible()
    tab.assert_quiet(hacked.server.url)
