"""A group and a rollout in a real browser: who decided, where siblings part, and the numbers of each token."""

import itertools
import re
from dataclasses import dataclass
from statistics import median

import pytest
from playwright.sync_api import expect

from forebay.engines.scripted import ScriptedEngine
from tests.browser.conftest import Tab
from tests.browser.planted import SHOWN
from tests.browser.planted_group import plant_group
from tests.browser.screenshots import check_image
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, damage, make_sample

FAILED = "slot 4 failed: engine_failure"
THEMES = [pytest.param({"color_scheme": scheme}, id=scheme) for scheme in ("light", "dark")]


@dataclass
class Planted:
    server: ServerProcess
    run: NativeRun
    group_id: str


@pytest.fixture(scope="module")
def planted(module_servers: MakeServer) -> Planted:
    run = plant_group(module_servers())
    return Planted(run.server, run, run.groups(state="acked")[0]["group_id"])


def open_group(tab: Tab, run: NativeRun, group_id: str) -> None:
    tab.page.goto(f"{run.server.url}/ui/#/runs/{run.run_id}/groups/{group_id}")
    expect(tab.page.get_by_role("heading", level=2, name="Side by side")).to_be_visible()
    expect(tab.page.get_by_text("Reading bodies")).to_have_count(0)


def open_rollout(tab: Tab, run: NativeRun, group_id: str, uid: str, filters: str = "") -> None:
    uid = uid.replace("/", "%2F")
    tab.page.goto(f"{run.server.url}/ui/#/runs/{run.run_id}/groups/{group_id}/samples/{uid}{filters}")
    expect(tab.page.get_by_role("heading", level=2, name="Reward")).to_be_visible()


@pytest.mark.parametrize("tab", THEMES, indirect=True)
def test_a_group_and_a_rollout_are_quiet_accessible_and_run_no_text_of_others(tab: Tab, planted: Planted) -> None:
    open_group(tab, planted.run, planted.group_id)
    expect(tab.page.get_by_text(f"{SHOWN} (epoch 0)")).to_be_visible()
    tab.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    tab.assert_accessible()
    colours = ("mask", "source", "version", "logprob")
    for uid, colour in itertools.product(("rollout/2", "rollout/3"), colours):
        open_rollout(tab, planted.run, planted.group_id, uid, f"?colour={colour}")
        tab.page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        expect(tab.page.get_by_label("Colour by")).to_have_value(colour)
        tab.assert_accessible()
    for words in (f"output {SHOWN}", SHOWN):
        expect(tab.page.get_by_text(words).first).to_be_visible()
    assert tab.page.locator("img, main script").count() == 0
    tab.assert_quiet(planted.server.url)


def test_a_group_shows_who_decided_and_where_its_rollouts_part(tab: Tab, planted: Planted) -> None:
    open_group(tab, planted.run, planted.group_id)
    expect(tab.page.locator(".fate")).to_have_text(
        re.compile("^Delivered in step 41, in batch batch-.*, and acknowledged")
    )
    rows = tab.page.get_by_role("region", name="5 samples, best reward first").get_by_role("row")
    order = ("rollout", "slot 0ok1", "slot 2", "slot 3", "slot 1", "slot 4")
    expect(rows).to_have_text([re.compile(f"^{start}") for start in order])
    expect(rows.nth(4)).to_contain_text("2 (retried)")
    expect(rows.nth(5)).to_contain_text("failed: engine_failure")
    expect(rows.nth(5)).to_contain_text(f"ConnectError: refused {SHOWN}")
    tree = tab.page.locator(".tree").first.inner_text()
    wanted = [
        "4 samples of 4 · mean reward 0.438 · 12 tokens",
        "Token 12, turn 1: the model chose one of 2 ways; their logprobs differ by 3",
        "try <img src",
        "1 sample of 4 · reward 0.5",
        "grep <img src",
        "Token 15, turn 1: what the model was given differs",
        "Token 18, turn 2: the model chose one of 2 ways; their logprobs differ by 0",
        "cat setup.py",
        "pip install",
    ]
    assert [words for words in wanted if words not in tree] == []
    columns = tab.page.get_by_role("region", name="Side by side").get_by_role("columnheader")
    expect(columns).to_have_text(["turn", "slot 0 1", "slot 2 0.5", "slot 3 0.25", "slot 1 0", FAILED])
    expect(
        tab.page.get_by_role("cell", name="4 samples; 1 failed, which no hook sees. Its 4 rewards are from 0 to 1")
    ).to_be_visible()
    tab.page.get_by_role("link", name="epoch 1").click()
    expect(tab.page.locator(".fate")).to_have_text("Open: 1 of 5 slots have a sample.")
    expect(tab.page.get_by_text("Without a sample: slot 1, 2, 3, 4.")).to_be_visible()
    expect(tab.page.get_by_role("row", name="epoch 0 41 acked 4 0.438")).to_be_visible()


def test_tokens_are_read_with_the_keyboard_and_coloured_by_what_the_trainer_wrote(tab: Tab, planted: Planted) -> None:
    open_rollout(tab, planted.run, planted.group_id, "rollout/2", "?colour=version")
    tokens = tab.page.get_by_role("group", name="Tokens")
    expect(tokens.locator("[data-mark]")).to_have_count(2)
    expect(tokens.locator(".trained")).to_have_count(7)
    tab.page.get_by_label("Colour by").select_option("trainer_logprobs (trainer, step 41)")
    expect(tokens.locator(".level5").first).to_be_visible()
    tokens.focus()
    for _ in range(12):
        tab.page.keyboard.press("ArrowRight")
    readout = tab.page.locator("#readout")
    expect(readout).to_contain_text(
        "Token 12: id 8 · trained on · source llm · version 1 · logprob -3.3 · trainer_logprobs"
    )
    tab.page.keyboard.press("End")
    expect(readout).to_contain_text("Token 19: id 7")
    expect(tab.page.get_by_role("cell", name="loss 0.125")).to_be_visible()
    tab.page.reload()
    expect(tab.page.get_by_label("Colour by")).to_have_value("trainer_logprobs (trainer, step 41)")
    tab.page.get_by_role("link", name="slot 3").press("Enter")
    expect(tab.page.get_by_role("heading", level=1)).to_be_focused()
    expect(tab.page.locator(".fate")).to_have_text("slot 3: ok, reward 0.25")
    expect(tab.page.get_by_role("definition").nth(1)).to_have_text("0.25")


def test_tokens_have_their_text_if_the_engine_of_the_run_decodes_them(tab: Tab, planted: Planted) -> None:
    with ScriptedEngine(lambda _: "").in_thread() as engine:
        run = planted.server.start_run(remote_engine_url=engine.url)
        ids = run.client.post(f"{engine.url}/tokenize", json={"prompt": "words here"}).json()["tokens"]
        run.write(make_sample(uid="a", tokens=ids))
        [group] = run.groups()
        open_rollout(tab, run, group["group_id"], "a")
        expect(tab.page.get_by_role("group", name="Tokens")).to_have_text("words here")


def test_a_damaged_body_and_one_of_another_shape_are_shown_in_their_places(tab: Tab, make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=4)
    verdicts = run.write(
        make_sample(uid="damaged", instance_id=1, note="to-be-damaged"),
        make_sample(
            uid="odd",
            instance_id=1,
            messages=[7, {"content": {"a": [1]}}, {"role": "assistant"}],
            tokens="x",
            token_spans={"a": 1},
            extra_info=[],
            for_reward="text",
            loss_mask=[[1]],
        ),
    )
    assert [each["status"] for each in verdicts] == [200, 200], verdicts
    damage(server.data_dir, b"to-be-damaged")
    [group] = run.groups()
    open_group(tab, run, group["group_id"])
    expect(tab.page.get_by_role("cell", name=re.compile("^a stored body cannot be read"))).to_be_visible()
    open_rollout(tab, run, group["group_id"], "damaged")
    expect(tab.page.get_by_text(re.compile("^a stored body cannot be read"))).to_be_visible()
    open_rollout(tab, run, group["group_id"], "odd")
    expect(tab.page.get_by_text('{ "a": [ 1 ] }')).to_be_attached()
    expect(tab.page.get_by_text("This sample has no token ids.")).to_be_visible()
    tab.page.goto(f"{server.url}/ui/#/runs/{run.run_id}/groups/{group['group_id']}/samples/none")
    expect(tab.page.get_by_text("has no sample none")).to_be_visible()
    tab.page.get_by_role("link", name="Group ").click()
    expect(tab.page.get_by_role("heading", level=2, name="Side by side")).to_be_visible()


def test_a_page_that_cannot_be_drawn_says_so_and_the_others_still_open(tab: Tab, planted: Planted) -> None:
    group = planted.run.group(planted.group_id)
    group["samples"] = [{**sample, "error": 7} for sample in group["samples"]]
    tab.page.route(f"**/groups/{planted.group_id}", lambda route: route.fulfill(json=group))
    tab.page.goto(f"{planted.server.url}/ui/#/runs/{planted.run.run_id}/groups/{planted.group_id}/samples/rollout%2F4")
    expect(tab.page.get_by_role("alert")).to_contain_text("The page cannot draw this")
    expect(tab.page.locator("pre")).to_contain_text('"uid":"rollout/4"')
    tab.page.unroute_all(behavior="wait")
    tab.page.get_by_role("link", name="Group ").click()
    expect(tab.page.get_by_role("heading", level=2, name="Side by side")).to_be_visible()


def test_131072_tokens_open_within_five_times_the_time_of_2048(tab: Tab, planted: Planted) -> None:
    run = planted.server.start_run(group_size=4)
    sizes = (2_048, 131_072)
    for size in sizes:
        ids = range(size)
        arrays = {
            "tokens": list(ids),
            "logprobs": [-(n % 37) / 7 for n in ids],
            "loss_mask": [int(n > 99) for n in ids],
        }
        run.send([make_sample(uid=str(size), instance_id=1, **arrays)])
    [group] = run.groups()
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for _ in range(3):
        for size in sizes:
            tab.page.goto("about:blank")
            open_rollout(tab, run, group["group_id"], str(size), "?colour=logprob")
            expect(tab.page.locator(".tokens [class*=level]").first).to_be_attached()
            tab.wait_for("new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(true))))")
            taken[size].append(tab.page.evaluate("performance.now()"))
    assert tab.page.locator(".tokens span").count() < 10_000
    assert median(taken[131_072]) <= 5 * median(taken[2_048]), taken


def test_the_images_of_the_docs_show_a_group_and_a_rollout_as_they_are(tab: Tab, make_server: MakeServer) -> None:
    run = plant_group(make_server(), "bash")
    [group] = run.groups(state="acked")
    tab.page.set_viewport_size({"width": 1100, "height": 760})
    open_group(tab, run, group["group_id"])
    check_image(tab, "ui_group", tab.page.screenshot())
    tab.page.set_viewport_size({"width": 1100, "height": 260})
    open_rollout(tab, run, group["group_id"], "rollout/2", "?colour=version")
    expect(tab.page.get_by_text("the run names no engine")).to_be_visible()
    tab.page.get_by_role("group", name="Tokens").focus()
    tab.page.keyboard.press("End")
    tab.page.get_by_role("heading", name="Tokens").evaluate("(node) => node.scrollIntoView()")
    check_image(tab, "ui_rollout", tab.page.screenshot())
