"""What the page under ``/ui/`` costs the server: of a large run as of a small one, and beside writers."""

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from statistics import median, quantiles
from urllib.parse import urlsplit

import pytest

from tests.benchmarks.bodies import sample_body
from tests.benchmarks.load import Sent, post, send
from tests.benchmarks.machines import show
from tests.conftest import MakeServer
from tests.large_run import GROUP_SIZE, LargeRun

pytestmark = pytest.mark.bench

SMALL, LARGE = 10_000, 100_000
"""Groups of ten samples."""
ROUNDS = 7
LOADS_S = 0.6
"""How long a page is loaded again and again, to find what one load costs."""
NUM_OLDER = 3
WRITERS, NUM_WRITES = 64, 16_000
EVERY_S = 2.0
"""How often an open page asks."""
MOST_TIMES, MOST_SHARE = 1.5, 0.02

PAGES: dict[str, Callable[[LargeRun], list[str]]] = {
    "run": LargeRun.run_page,
    "run, in a state that no group has": lambda run: run.run_page(state="leased"),
    "run, from the middle on": lambda run: run.run_page(state="acked", after=run.named(run.num_groups // 2)),
    "run, every 2 s": LargeRun.run_page_again,
    "group": LargeRun.group_page,
    "rollout": LargeRun.rollout_page,
}


@pytest.fixture(scope="module")
def runs(module_servers: MakeServer) -> tuple[LargeRun, LargeRun]:
    """The small run and the large one, on a server each."""
    small, large = (LargeRun(module_servers(log_level="warning"), number) for number in (SMALL, LARGE))
    return small.fill(), large.fill()


def connect(run: LargeRun) -> closing[http.client.HTTPConnection]:
    """A connection to a run's server, which stays open as a browser's does."""
    return closing(http.client.HTTPConnection(urlsplit(run.run.server.url).netloc, timeout=60))


def load(connection: http.client.HTTPConnection, paths: list[str]) -> None:
    """Ask for each of ``paths``."""
    for path in paths:
        connection.request("GET", path)
        with connection.getresponse() as reply:
            body = reply.read()
        assert reply.status == 200, (path, body)


def cpu_s(run: LargeRun) -> float:
    """CPU seconds of a run's server: its clock, as ``/proc`` counts in steps of 10 ms."""
    return time.clock_gettime((~run.run.server.pid << 3) | 2)


def load_ms(run: LargeRun, paths: list[str], seconds: float = LOADS_S) -> float:
    """CPU of one load, from those of ``seconds``, at least one."""
    with connect(run) as connection:
        until_s, began_s, num_loads = time.monotonic() + seconds, cpu_s(run), 0
        while not num_loads or time.monotonic() < until_s:
            load(connection, paths)
            num_loads += 1
        return (cpu_s(run) - began_s) / num_loads * 1e3


def older_ms(run: LargeRun) -> float:
    """CPU of one request for 20 batches whose figures were not asked for before."""
    places = [run.num_batches * place // (NUM_OLDER + 1) for place in range(NUM_OLDER)]
    return median(load_ms(run, [f"{run.run.path}/history?after={after}&limit=20"], seconds=0) for after in places)


def test_a_large_run_costs_a_page_what_a_small_one_costs(runs: tuple[LargeRun, LargeRun]) -> None:
    older = [older_ms(run) for run in runs]
    for run in runs:
        load_ms(run, run.run_page(), seconds=0)  # its newest batches are new only once
    costs: dict[str, list[list[float]]] = {name: [[], []] for name in [*PAGES, "overview"]}
    for _ in range(ROUNDS):
        for name, paths in PAGES.items():
            for run, found in zip(runs, costs[name], strict=True):
                found.append(load_ms(run, paths(run)))
        # It is made at most once a second: not since the page of the run asked for it.
        for run, found in zip(runs, costs["overview"], strict=True):
            found.append(load_ms(run, run.overview(), seconds=0))
    means = {name: [median(found) for found in both] for name, both in costs.items()} | {"run, 20 more batches": older}
    ratios = {name: large / small for name, (small, large) in means.items()}
    titles = ["page", *(f"{run.num_groups:,} groups" for run in runs), f"ratio (at most {MOST_TIMES})"]
    show("CPU of one load, ms", titles, [(name, *means[name], ratio) for name, ratio in ratios.items()])
    assert {name: ratio for name, ratio in ratios.items() if ratio > MOST_TIMES} == {}


@contextmanager
def open_pages(run: LargeRun, paths: list[str], number: int) -> Iterator[None]:
    """That many pages, which ask in turn while the body runs."""
    is_over = threading.Event()

    def ask() -> None:
        with connect(run) as connection:
            while not is_over.is_set():
                load(connection, paths)
                is_over.wait(EVERY_S / number)

    threads = [threading.Thread(target=ask)] if number else []
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_an_open_page_takes_two_percent_and_delays_no_write(runs: tuple[LargeRun, LargeRun]) -> None:
    _, run = runs
    # The share of one page is less than what differs between rounds.
    pages = {"none": 0, "the overview and the run": 1, "the run, ten times": 10}
    p99_ms, cpu_us = ({name: list[float]() for name in pages} for _ in range(2))
    overviews: list[float] = []
    for turn in range(ROUNDS):
        for name in [*list(pages)[turn % len(pages) :], *list(pages)[: turn % len(pages)]]:
            paths = run.run_page_again() if name == "the run, ten times" else [*run.overview(), *run.run_page_again()]
            load_ms(run, paths, seconds=0)  # the figures of a new batch are found once: the table above has their cost
            began_s = cpu_s(run)
            sent = _write(run, f"{name}-{turn}-", paths, pages[name])
            used_s = cpu_s(run) - began_s
            p99_ms[name].append(quantiles(sent.took_s, n=100)[-1] * 1e3)
            cpu_us[name].append(used_s / NUM_WRITES * 1e6)
            if name == "none":
                # The server has made none for longer than a second.
                overviews.append(load_ms(run, run.overview(), seconds=0) / 1e3 / EVERY_S / (used_s / sent.wall_s))
            run.run.take(num_groups=NUM_WRITES // GROUP_SIZE)  # each round begins with as many that are ready
            run.num_batches += 1
    delays = {name: median(found) / median(p99_ms["none"]) for name, found in p99_ms.items()}
    more = [(ten - none) / ten for ten, none in zip(cpu_us["the run, ten times"], cpu_us["none"], strict=True)]
    shares = {"the run": median(more) / 10, "the overview": median(overviews)}
    rows = [(name, median(p99_ms[name]), delays[name], median(cpu_us[name])) for name in pages]
    show(f"{WRITERS} writers", ["open pages", "p99 of a write, ms", "ratio", "CPU of a write, µs"], rows)
    titles = ["open page", f"share of the server's CPU (at most {MOST_SHARE:.0%})"]
    show("One open page beside them", titles, [(name, f"{share:.2%}") for name, share in shares.items()])
    assert delays["the overview and the run"] <= MOST_TIMES
    assert {name: share for name, share in shares.items() if share > MOST_SHARE} == {}


def _write(run: LargeRun, prefix: str, paths: list[str], number: int) -> Sent:
    """Write samples of 1 KB, one a request, while ``number`` pages are open."""
    path = f"{run.run.path}/samples"
    requests = [post(path, sample_body(each, 1_000, GROUP_SIZE, prefix)) for each in range(NUM_WRITES)]
    with open_pages(run, paths, number):
        return send(run.run.server.url, requests.__getitem__, len(requests), WRITERS)
