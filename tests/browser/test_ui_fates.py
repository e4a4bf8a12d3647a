"""The first sentence of a discarded group: who decided it, and on what."""

import re

import pytest
from playwright.sync_api import expect

from forebay.core.group import DiscardReason
from tests.browser.conftest import Tab
from tests.browser.planted_fates import PLANTED, SHORTENS, with_hooks
from tests.conftest import MakeServer
from tests.kit import NativeRun, ServerProcess, make_group, poll_until

SENTENCES = {
    DiscardReason.TIMED_OUT: r"1 of 2 samples arrived before a deadline \(group_timeout_seconds: 0\.3, "
    r"group_deadline_seconds: 3,600\), or before the run gave up its free slots\.",
    DiscardReason.INVALID: r"is_valid_group \(built-in\) refused it\. All 2 rewards are 0\.5\.",
    DiscardReason.FILTERED: r"filter_item \(file filters_generator\.py, then built-in\) left too few samples: "
    r"0 of 2 items were kept\. Its 2 rewards are from 0 to 1\.",
    DiscardReason.INCOMPLETE: r"a slime route delivers only whole groups, and 1 of 2 rows were left by transform_group "
    r"\(file shortens_generator\.py, then built-in\)\.",
    DiscardReason.HOOK_FAILED: r"normalize_group_data \(file raises_generator\.py, then built-in\) failed: "
    r"RuntimeError: it broke\.",
    DiscardReason.FAILED: r"no sample is left to deliver: all 2 samples failed: 2 agent_failure\.",
    DiscardReason.UNREADABLE: r"the server lost a part of it: a stored body cannot be read: segment 1: bytes .* do not "
    r"match their checksum\.",
    DiscardReason.STALE: r"its oldest sample has weight version 1; the current version is 5\. max_staleness is 1\.",
    DiscardReason.EVALUATED: r"it belongs to the evaluation of exam at step 3, and goes to no trainer\.",
}


@pytest.fixture(scope="module")
def server(module_servers: MakeServer) -> ServerProcess:
    return module_servers()


@pytest.mark.parametrize("reason", DiscardReason)
def test_the_first_sentence_of_a_discarded_group_says_who_decided_and_on_what(
    tab: Tab, server: ServerProcess, reason: DiscardReason
) -> None:
    assert_fate(tab, PLANTED[reason](server), f"{reason}: {SENTENCES[reason]}")


def test_rewards_outside_the_range_are_named_with_the_filter_that_is_built_in(tab: Tab, server: ServerProcess) -> None:
    run = server.start_run(group_size=2, reward_range=[0, 1])
    run.write(*make_group("one", [7.0, 9.0]))
    run.read(num_groups=1, wait_s=0)
    assert_fate(tab, run, r"filtered: filter_item \(built-in\) left too few .* from 7 to 9\.")


def test_the_hooks_of_a_simplified_generator_are_those_that_a_read_calls(tab: Tab, server: ServerProcess) -> None:
    assert_fate(tab, with_hooks(server, "simplified", SHORTENS), "incomplete: .*")
    rows = tab.page.get_by_role("region", name="In the order of a read").locator("tbody tr")
    starts = [f"{hook}file simplified_generator.py" for hook in ("is_valid_group", "transform_group")]
    expect(rows).to_have_text([re.compile(f"^{start}") for start in starts])


def assert_fate(tab: Tab, run: NativeRun, sentence: str) -> None:
    [group] = poll_until(lambda: run.groups(state="discarded"))
    tab.page.goto(f"{run.server.url}/ui/#/runs/{run.run_id}/groups/{group['group_id']}")
    expect(tab.page.locator(".fate")).to_have_text(re.compile(f"^Discarded as {sentence}$"))
