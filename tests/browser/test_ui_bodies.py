"""Bodies that a page cannot show: removed, damaged, or of another shape. The page says so where each would stand."""

import re

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import Tab
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, make_group, make_sample

REMOVED = "Retention has removed this body. keep_bodies keeps more."


@pytest.fixture(scope="module")
def server(module_servers: MakeServer) -> ServerProcess:
    return module_servers()


def group_page(run: NativeRun) -> str:
    """The address of the page of the run's first group."""
    return f"{run.server.url}/ui/#/runs/{run.run_id}/groups/{run.groups()[0]['group_id']}"


def test_a_body_that_retention_has_removed_is_told_in_its_place(tab: Tab, make_server: MakeServer) -> None:
    server = make_server(segment_bytes=65_536, replay_bytes=0)
    run = server.start_run(group_size=2, keep_checkpoints=1)
    for step in range(2):
        run.write(*(each for n in range(8) for each in make_group(f"{step}-{n}", [0.0, 1.0], note="x" * 8_000)))
        run.checkpoint(step, run.read(num_groups=8, step=step))
    assert server.client.post("/v1/gc").is_success
    tab.page.goto(group_page(run))
    expect(tab.page.get_by_role("cell", name=REMOVED)).to_have_count(2)
    expect(tab.page.get_by_text("No body can be shown.")).to_be_visible()
    tab.page.get_by_role("link", name="slot 0").click()
    expect(tab.page.locator(".fate")).to_have_text("slot 0: ok, reward 0")
    expect(tab.page.get_by_text(REMOVED)).to_be_visible()
    tab.assert_quiet(server.url)


@pytest.mark.parametrize(
    ("body", "told", "shown"),
    [
        (["another shape"], "is not a JSON object", '["another shape"]'),
        ({"messages": "another shape"}, "messages is not a list", '"another shape"'),
    ],
    ids=["no object", "no list"],
)
def test_a_body_of_another_shape_is_named_and_shown_as_written(
    tab: Tab, server: ServerProcess, body: object, told: str, shown: str
) -> None:
    run = server.start_run(group_size=2)
    run.write(make_sample())
    # The server refuses to store these, but may have stored them once.
    tab.page.route("**/body?*", lambda route: route.fulfill(json=body))
    tab.page.goto(group_page(run))
    expect(tab.page.get_by_role("cell", name=told)).to_be_visible()
    tab.page.get_by_role("link", name="slot 0").first.click()
    expect(tab.page.get_by_text(told)).to_be_visible()
    expect(tab.page.locator("pre", has_text=re.compile(f"^{re.escape(shown)}$"))).to_be_visible()
    tab.assert_quiet(server.url)
