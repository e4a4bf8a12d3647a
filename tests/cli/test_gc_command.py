"""``forebay gc``, and the sizes that ``forebay status`` shows, against a real server."""

import json

from forebay.buffer.retention_rules import Keep
from forebay.server.cli.gc_command import REASONS
from tests.cli.conftest import Forebay
from tests.conftest import MakeServer
from tests.kit import make_group, poll_until


def test_gc_removes_what_is_over_the_budget_and_tells_what_is_kept(forebay: Forebay, make_server: MakeServer) -> None:
    server = make_server(segment_bytes=65_536, max_journal_bytes=100_000)
    target = ["--url", server.url]
    assert "stored: " in forebay("status", *target).out
    run = server.start_run(group_size=2)
    for instance in range(20):
        run.write(*make_group(instance, [0.0, 1.0], text="x" * 8_000))
    run.release(run.read(num_groups=20))
    over = forebay("gc", *target)
    assert over.code == 0
    assert "100,000 bytes" in over.out
    assert "and nothing more can be removed" in over.out
    assert "bytes ready for a trainer" in over.out
    assert "over the budget" in forebay("status", *target).out
    run.take(num_groups=20)
    done = json.loads(forebay("gc", "--json", *target).out)
    assert done["num_segments_freed"] > 0
    assert done["num_bytes_freed"] > 100_000
    assert done["num_bytes"] <= done["max_bytes"] == 100_000
    again = forebay("gc", *target)
    assert "removed" in again.out
    assert "0 bytes in 0 segments" in again.out
    assert f"{done['num_bytes']:,} bytes in {done['num_segments']} segment" in again.out
    run.stop()


def test_gc_of_a_run_removes_it(forebay: Forebay, make_server: MakeServer) -> None:
    server = make_server(segment_bytes=65_536)
    target = ["--url", server.url]
    run = server.start_run(group_size=2, name="mine")
    for instance in range(20):
        run.write(*make_group(instance, [0.0, 1.0], text="x" * 8_000))
    refused = forebay("gc", "--run", "mine", *target)
    assert refused.code == 1
    assert f"run {run.run_id} has not ended" in refused.err
    assert f"`forebay stop {run.run_id}`" in refused.err
    run.take(num_groups=20)
    run.stop()
    poll_until(lambda: run.view()["has_ended"])
    done = json.loads(forebay("gc", "--run", "mine", "--json", *target).out)
    assert done["num_segments_freed"] > 0
    assert server.client.get("/v1/runs").json()["runs"] == []
    assert done["removed_run_id"] == run.run_id
    assert "has no run 'mine'" in forebay("gc", "--run", "mine", *target).err


def test_gc_without_a_server_says_so(forebay: Forebay) -> None:
    outcome = forebay("gc", "--url", "http://127.0.0.1:9")
    assert outcome.code == 1
    assert "no server answers" in outcome.err


def test_every_reason_has_words() -> None:
    assert set(REASONS) == {reason.value for reason in Keep}
