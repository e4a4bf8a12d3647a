"""The page under /ui/ in a real browser: quiet, accessible, usable by keyboard, and unmoved by hostile text."""

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Tab
from tests.browser.planted import HOSTILE, SHOWN, plant_dull, plant_hostile, plant_learning
from tests.browser.screenshots import check_image
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, make_group, poll_until

CASES = json.loads((Path(__file__).parents[1] / "visible_cases.json").read_text(encoding="utf-8"))
THEMES = [pytest.param({"color_scheme": scheme}, id=scheme) for scheme in ("light", "dark")]


@dataclass
class Planted:
    server: ServerProcess
    sums: NativeRun
    other: NativeRun
    dull: NativeRun
    hostile: NativeRun

    @property
    def ui(self) -> str:
        return f"{self.server.url}/ui"


@pytest.fixture(scope="module")
def planted(module_servers: MakeServer) -> Planted:
    server = module_servers()
    runs = plant_learning(server, "sums", 1), plant_learning(server, "sums-lr2", 2), plant_dull(server)
    found = Planted(server, *runs, plant_hostile(server))
    poll_until(lambda: "failed" in {run["state"] for run in server.client.get("/v1/overview").json()["runs"]})
    return found


def open_run(tab: Tab, planted: Planted, run: NativeRun, filters: str = "") -> None:
    tab.page.goto(f"{planted.ui}/#/runs/{run.run_id}{filters}")
    expect(tab.page.get_by_role("heading", level=2, name="Groups", exact=True)).to_be_visible()


@pytest.mark.parametrize("tab", THEMES, indirect=True)
def test_the_overview_is_quiet_and_accessible(tab: Tab, planted: Planted) -> None:
    tab.page.goto(f"{planted.ui}/")
    expect(tab.page.get_by_role("link", name=re.compile("^sums "))).to_be_visible()
    tab.assert_accessible()
    tab.assert_quiet(planted.server.url)


@pytest.mark.parametrize("tab", THEMES, indirect=True)
def test_a_run_beside_another_is_quiet_and_accessible(tab: Tab, planted: Planted) -> None:
    open_run(tab, planted, planted.sums, f"?compare={planted.other.run_id}")
    expect(tab.page.locator(".chart[data-drawn] .main-svg").first).to_be_visible()
    expect(tab.page.locator(".chart[data-drawn]")).to_have_count(4)
    tab.page.get_by_text("The batches as a table").click()
    tab.assert_accessible()
    tab.assert_quiet(planted.server.url)


@pytest.mark.parametrize("tab", THEMES, indirect=True)
def test_the_theme_can_be_chosen(tab: Tab, planted: Planted) -> None:
    tab.page.goto(f"{planted.ui}/")
    for theme, shown in (("dark", "rgb(20, 23, 26)"), ("light", "rgb(255, 255, 255)")):
        tab.page.get_by_label("Theme").select_option(theme)
        expect(tab.page.locator("body")).to_have_css("background-color", shown)
        tab.page.reload()
        expect(tab.page.get_by_label("Theme")).to_have_value(theme)


def test_hostile_texts_are_shown_and_never_run(tab: Tab, planted: Planted) -> None:
    tab.page.goto(f"{planted.ui}/")
    expect(tab.page.get_by_text(SHOWN).first).to_be_visible()
    assert SHOWN in tab.page.get_by_role("list", name="What is wrong").inner_text()
    open_run(tab, planted, planted.hostile, "?state=acked")
    expect(tab.page.get_by_role("cell", name=f"{SHOWN} (epoch 0)", exact=True).first).to_be_visible()
    expect(tab.page.get_by_role("cell", name=f"open {SHOWN} (epoch 0)", exact=True).first).to_be_visible()
    tab.page.goto(f"{planted.ui}/#/runs/{HOSTILE.replace('/', '')}")
    expect(tab.page.get_by_role("link", name="Go to the overview")).to_be_visible()
    assert tab.page.locator("img, main script").count() == 0
    assert tab.dialogs == []


def test_what_is_wrong_is_the_first_sentence(tab: Tab, planted: Planted) -> None:
    open_run(tab, planted, planted.dull)
    first = tab.page.get_by_role("list", name="What is wrong").get_by_role("listitem").first
    expect(first).to_contain_text("all 3 finished groups were discarded, most as invalid: all rewards are equal")
    expect(tab.page.get_by_role("cell", name="invalid", exact=True)).to_have_count(3)


def test_a_stalled_engine_is_the_first_sentence(tab: Tab, make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(name="stuck", remote_engine_url="http://127.0.0.1:9", group_deadline_seconds=1)
    run.write(*make_group("one", [1.0]))
    poll_until(lambda: run.view()["is_stalled"])
    tab.page.goto(f"{server.url}/ui/")
    first = tab.page.get_by_role("list", name="What is wrong").get_by_role("listitem").first
    expect(first).to_contain_text(re.compile(r"^stuck has made no progress for .* s: "))
    expect(tab.page.get_by_role("cell", name="does not answer")).to_be_visible()
    first.get_by_role("link").click()
    expect(tab.page.get_by_role("heading", level=1)).to_have_text(run.run_id)
    tab.assert_quiet(server.url)


def test_without_plotly_charts_name_the_extra_and_the_table_has_the_numbers(tab: Tab, planted: Planted) -> None:
    tab.page.route("**/plotly.min.js", lambda route: route.fulfill(status=404))
    open_run(tab, planted, planted.sums)
    expect(tab.page.get_by_text("pip install 'forebay[report]'")).to_have_count(4)
    tab.page.get_by_text("The batches as a table").click()
    expect(tab.page.get_by_role("link", name=re.compile("^batch-0000"))).to_have_count(12)


def test_a_point_leads_to_the_groups_of_its_batch(tab: Tab, planted: Planted) -> None:
    open_run(tab, planted, planted.sums)
    expect(tab.page.locator(".chart[data-drawn]")).to_have_count(4)
    # A trace of points is clicked where its last point is drawn.
    point = tab.page.locator(".chart").first.locator(".points path").last
    point.dispatch_event("mouseover")
    box = point.bounding_box()
    assert box
    tab.page.mouse.move(box["x"] + 3, box["y"] + 3)
    tab.page.mouse.click(box["x"] + 3, box["y"] + 3)
    expect(tab.page.get_by_text(re.compile("^Of batch batch-"))).to_be_visible()
    batch = tab.page.url.rpartition("batch=")[2]
    wanted = planted.sums.client.get(f"{planted.sums.path}/groups", params={"batch": batch}).json()["groups"]
    for group in wanted:
        expect(tab.page.get_by_role("link", name=group["group_id"])).to_be_visible()
    tab.assert_quiet(planted.server.url)


def test_every_page_is_used_by_keyboard(tab: Tab, planted: Planted) -> None:
    tab.page.goto(f"{planted.ui}/")
    expect(tab.page.get_by_role("link", name=re.compile("^sums "))).to_be_visible()
    tab.page.keyboard.press("Tab")
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate("document.activeElement.localName") == "main"
    reach(tab, planted.sums.run_id)
    tab.page.keyboard.press("Enter")
    expect(tab.page.get_by_role("heading", level=2, name="Groups", exact=True)).to_be_visible()
    reach(tab, "The batches as a table")
    tab.page.keyboard.press("Enter")
    reach(tab, "batch-")
    tab.page.keyboard.press("Enter")
    expect(tab.page.get_by_text(re.compile("^Of batch batch-"))).to_be_visible()
    reach(tab, "copy")
    tab.page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # as over plain HTTP
    tab.page.keyboard.press("Enter")
    assert tab.page.evaluate("getSelection().toString()") == f"forebay status {planted.sums.run_id}"
    tab.assert_quiet(planted.server.url)


def reach(tab: Tab, words: str) -> None:
    """Press Tab until a link, a button or a summary with these words has the focus."""
    for _ in range(200):
        tab.page.keyboard.press("Tab")
        focused = tab.page.evaluate("[document.activeElement.localName, document.activeElement.textContent]")
        if focused[0] in ("a", "button", "summary") and words in focused[1]:
            return
    raise AssertionError(f"Tab never reaches {words!r}")


def test_a_refresh_moves_neither_focus_nor_selection_nor_scroll(tab: Tab, make_server: MakeServer) -> None:
    run = make_server().start_run(name="moving", group_size=2)
    for number in range(60):
        run.write(*make_group(f"ready-{number}", [0.0, 1.0]))
    tab.page.goto(f"{run.server.url}/ui/charts#/runs/{run.run_id}?state=open")
    field = tab.page.get_by_label("Instance contains")
    field.fill("read")
    field.evaluate("(node) => { node.focus(); node.setSelectionRange(1, 3); }")
    tab.page.evaluate("scrollTo(0, 200)")
    before = tab.page.evaluate("scrollY")
    run.write(*make_group("another", [1.0]))
    expect(tab.page.get_by_text("61 open")).to_be_attached()
    kept = "(node) => [document.activeElement === node, node.selectionStart, node.selectionEnd, node.value, scrollY]"
    assert field.evaluate(kept) == [True, 1, 3, "read", before]


def test_the_groups_of_a_run_come_in_pages(tab: Tab, make_server: MakeServer) -> None:
    run = make_server().start_run(group_size=2)
    run.write(*(sample for number in range(101) for sample in make_group(f"one-{number}", [0.0, 1.0])))
    tab.page.goto(f"{run.server.url}/ui/#/runs/{run.run_id}?state=open")
    rows = tab.page.get_by_role("region", name="By the spread").locator("tbody tr")
    expect(rows).to_have_count(100)
    tab.page.get_by_role("link", name="Show the next 100").click()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("one-0 ")
    tab.page.get_by_role("link", name="Show the newest 100").click()
    expect(rows).to_have_count(100)


def test_what_a_run_page_asks_seldom_is_asked_again(tab: Tab, make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run()
    tab.page.clock.install()
    tab.page.goto(f"{server.url}/ui/#/runs/{run.run_id}")
    choices = tab.page.get_by_label("Compare with").locator("option")
    expect(choices).to_have_count(1)
    server.start_run()
    tab.page.clock.fast_forward(16_000)
    expect(choices).to_have_count(2)


def test_an_unknown_run_or_page_says_so_and_links_back(tab: Tab, planted: Planted) -> None:
    for address, words in (("charts#/runs/none", "no run 'none'"), ("#/nowhere", "names no page")):
        tab.page.goto(f"{planted.ui}/{address}")
        tab.page.reload()
        expect(tab.page.get_by_text(words)).to_be_visible()
        tab.page.get_by_role("link", name="Go to the overview").click()
        expect(tab.page.get_by_role("heading", level=1)).to_have_text("Overview")


def test_a_server_that_is_gone_leaves_its_last_data_with_their_age(tab: Tab, make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(name="kept")
    tab.page.goto(f"{server.url}/ui/")
    expect(tab.page.get_by_role("link", name=re.compile("^kept "))).to_be_visible()
    server.kill9()
    expect(tab.page.get_by_role("alert")).to_contain_text("the server does not answer")
    expect(tab.page.get_by_role("alert")).to_contain_text(re.compile(r"What you see is \d+ s old"))
    expect(tab.page.get_by_role("link", name=re.compile(run.run_id))).to_be_visible()
    server.restart()
    expect(tab.page.get_by_role("alert")).to_have_count(0, timeout=60_000)


def test_the_viewers_token_is_asked_for_and_stays_in_the_tab(tab: Tab, make_server: MakeServer) -> None:
    server = make_server(token="secret", viewer_token="look")
    tab.page.goto(f"{server.url}/ui/")
    tab.page.get_by_label("Token").fill("wrong")
    tab.page.get_by_role("button", name="Open").click()
    expect(tab.page.get_by_text("The server refuses this token.")).to_be_visible()
    tab.assert_accessible()
    tab.page.get_by_label("Token").fill("lo\u2026ok")
    tab.page.get_by_role("button", name="Open").click()
    expect(tab.page.locator("input:invalid")).to_be_focused()
    tab.page.get_by_label("Token").fill(" look ")
    tab.page.get_by_role("button", name="Open").click()
    expect(tab.page.get_by_text("No run yet.")).to_be_visible()
    tab.page.reload()
    expect(tab.page.get_by_text("No run yet.")).to_be_visible()
    assert tab.page.evaluate("[document.cookie, localStorage.length]") == ["", 0]
    assert not [url for url in tab.requests if "look" in url or "secret" in url]


def test_a_hidden_tab_asks_nothing(tab: Tab, planted: Planted) -> None:
    tab.page.clock.install()
    tab.page.add_init_script("Object.defineProperty(document, 'hidden', {get: () => window.isHidden === true})")
    tab.page.goto(f"{planted.ui}/")
    expect(tab.page.get_by_role("link", name=re.compile("^sums "))).to_be_visible()
    with tab.page.expect_request("**/v1/overview"):
        tab.page.clock.run_for(3_000)
    tab.page.evaluate("isHidden = true")
    tab.page.clock.run_for(3_000)
    asked = len(tab.requests)
    tab.page.clock.run_for(120_000)
    assert len(tab.requests) == asked
    with tab.page.expect_request("**/v1/overview"):
        tab.page.evaluate("isHidden = false; document.dispatchEvent(new Event('visibilitychange'))")


def test_the_twin_of_visible_text_is_held_to_the_same_cases(tab: Tab, planted: Planted) -> None:
    tab.page.goto(f"{planted.ui}/")
    shown = tab.page.evaluate(
        "async (texts) => { const { visible } = await import('/ui/text.mjs'); "
        "return JSON.parse(texts).map((text) => visible(text)); }",
        json.dumps([text for text, _ in CASES]),
    )
    assert shown == [expected for _, expected in CASES]


def test_the_images_of_the_docs_show_the_overview_and_a_run_as_they_are(tab: Tab, make_server: MakeServer) -> None:
    server = make_server()
    runs = [plant_learning(server, name, seed) for seed, name in enumerate(("sums", "sums-lr2"))]
    server.start_run(name="stuck", remote_engine_url="http://127.0.0.1:9").write(*make_group("one", [1.0]))
    tab.page.set_viewport_size({"width": 1100, "height": 540})
    tab.page.goto(f"{server.url}/ui/")
    expect(tab.page.get_by_text(re.compile("^stuck: rollouts of 1 open group wait for"))).to_be_visible()
    check_image(tab, "ui_overview", tab.page.screenshot())
    tab.page.goto(f"{server.url}/ui/charts#/runs/{runs[0].run_id}?compare={runs[1].run_id}")
    expect(tab.page.locator(".chart[data-drawn]")).to_have_count(4)
    check_image(tab, "ui_run", tab.page.locator("section").first.screenshot())
