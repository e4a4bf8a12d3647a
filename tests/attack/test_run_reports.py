"""Reports with a run's key: each is bounded, many of them do not accumulate, and what has not changed costs nothing."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forebay.generators.buffer_link.abc import ProgressReport, WorkerReport
from forebay.generators.buffer_link.forebay import ServerLink
from tests.conftest import MakeServer
from tests.kit import TIME_LIMIT_S, NativeRun, ServerProcess, assert_error
from tests.lent import lend_runs, lent_url
from tests.steady_load import resident_bytes

NUM_REPORTS = 100
LONGEST_S = 10.0
WORKER = {
    "number": 0,
    "node": "",
    "state": "ready",
    "num_in_flight": 0,
    "num_restarts": 0,
    "rss_bytes": 0,
    "blocked_s": 0.0,
    "blocked_at": "",
    "reason": "",
}


class Lent:
    """A run whose process leaves reporting to the test."""

    def __init__(self, server: ServerProcess) -> None:
        lend_runs(server)
        self.server = server
        rows = server.directory / "rows.jsonl"
        rows.write_text('{"prompt": "1 + 1"}\n')
        self.run: NativeRun = server.start_run("lent", group_size=2, input_file=str(rows))
        self.url = lent_url(server, self.run.run_id)
        self._client = httpx.Client(timeout=TIME_LIMIT_S)

    def report(self, **fields: Any) -> httpx.Response:
        return self._client.post(f"{self.url}/progress", json=fields)

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def lent(make_server: MakeServer) -> Iterator[Lent]:
    run = Lent(make_server())
    yield run
    run.close()


def keys(number: int) -> list[list[Any]]:
    return [[f"task-{each}", 0] for each in range(number)]


BEYOND: list[tuple[str, Any, str]] = [
    ("opened", keys(501), "500"),
    ("idle", keys(501), "500"),
    ("busy", keys(501), "500"),
    ("short", keys(501), "500"),
    ("opened", [["x" * 1_025, 0]], "1024"),
    ("counts", {f"name_{number}": 1 for number in range(257)}, "256"),
    ("num_groups_total", 10**30, ""),
    ("workers", [WORKER] * 1_025, "1024"),
    ("workers", [{**WORKER, "reason": "x" * 513}], "512"),
    ("workers", [{**WORKER, "blocked_at": "x" * 513}], "512"),
]


def test_a_report_beyond_a_bound_is_refused_by_its_name(lent: Lent) -> None:
    before = resident_bytes(lent.server)
    for field, value, bound in BEYOND:
        reply = lent.report(**{field: value})
        assert reply.status_code == 422, reply.text
        error = reply.json()["error"]
        assert error["field"].startswith(field)
        assert bound in error["message"]
    for body in ({"opened": keys(200_000)}, {"unknown": [[0, 0]] * 400_000}):
        reply = lent.report(**body)
        assert "2097152" in assert_error(reply, 422, "invalid_input", "body")["message"]
        assert reply.elapsed.total_seconds() < LONGEST_S
    assert resident_bytes(lent.server) - before < 250 << 20
    assert lent.run.groups() == []
    assert lent.report(opened=keys(1)).is_success
    assert len(lent.run.groups()) == 1


def journal_bytes(server: ServerProcess) -> int:
    return sum(path.stat().st_size for path in (server.data_dir / "segments").iterdir())


def test_names_of_counts_do_not_accumulate_over_reports(lent: Lent) -> None:
    before = journal_bytes(lent.server)
    for is_gateway in (False, True):
        replies = [
            lent.report(
                process_id=f"process-{number}",
                counts={f"name_{number}_{each}_".ljust(64, "x"): 1 for each in range(256)},
                is_gateway=is_gateway,
            )
            for number in range(NUM_REPORTS)
        ]
        assert replies[0].is_success
        for reply in replies[1:]:
            assert "256" in assert_error(reply, 422, "invalid_input", "counts")["message"]
    assert journal_bytes(lent.server) - before < 1 << 20
    # Another process under the same names is welcome, as after each restart.
    names = {f"name_0_{each}_".ljust(64, "x"): 1 for each in range(256)}
    assert lent.report(process_id="after", counts=names).is_success


def test_a_report_that_changes_nothing_is_not_journalled(lent: Lent) -> None:
    report = {
        "process_id": "one",
        "counts": {"rollouts_finished": 1},
        "workers": [{**WORKER, "reason": "x" * 512}],
        "opened": keys(500),
        "idle": keys(500),
        "num_groups_total": 1_000,
    }
    assert lent.report(**report).is_success
    del report["opened"]
    num_growths = 0
    for _ in range(NUM_REPORTS):
        before = journal_bytes(lent.server)
        assert lent.report(**report).is_success
        num_growths += journal_bytes(lent.server) != before
    # The run's active seconds are journalled, too, once in five of them.
    assert num_growths <= NUM_REPORTS // 20


async def test_what_a_run_process_reports_is_cut_to_the_bounds(lent: Lent) -> None:
    link = ServerLink(lent.url)
    worker = WorkerReport(**{**WORKER, "blocked_at": "x" * 5_000, "reason": "y" * 5_000})  # type: ignore[arg-type]
    groups = [(f"task-{number}", 0) for number in range(2_500)]
    try:
        await link.report(ProgressReport(opened=groups, idle=groups[:1_500], workers=[worker] * 2_000))
    finally:
        await link.close()
    view = lent.run.view()
    assert view["groups"]["open"] == 2_500
    assert len(view["workers"]) == 1_024
    assert view["workers"][0]["reason"] == "y" * 512
