"""384 bytes of side arrays for each token: what they cost token reads and small writes, and how fast they move."""

import threading
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from statistics import median, quantiles

import numpy
import pytest

from forebay.client import BufferClient, Rows
from forebay.core.safetensors_format import TENSORS_TYPE
from tests.benchmarks.load import post
from tests.benchmarks.machines import request_seconds, show
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, make_sample

pytestmark = pytest.mark.bench

ROUNDS, READS = 3, 9
NUM_SAMPLES, NUM_TOKENS, ROW_BYTES, GROUP_SIZE = 128, 4_000, 384, 8
NUM_GROUPS = NUM_SAMPLES // GROUP_SIZE
ARRAY_BYTES = NUM_SAMPLES * (NUM_TOKENS - 1) * ROW_BYTES
PLAIN_TOKENS = (NUM_TOKENS - 1) * ROW_BYTES // 9 + NUM_TOKENS
"""Tokens of a sample whose body is as large as a part and its sample."""

AT_MOST = {
    "token read": 1.1,
    "arrays(), or tensors as large": 1 / 0.8,
    "p99 of a small write": 3.0,
    "write, or bodies as large": 1 / 0.8,
}

ROUTES = numpy.random.default_rng(1).integers(0, 128, (NUM_TOKENS - 1, ROW_BYTES), dtype="uint8")


def samples(num_tokens: int, *, has_arrays: bool) -> Iterator[Json]:
    arrays = {"tokens": array("i", range(num_tokens)), "logprobs": array("f", bytes(4 * num_tokens))}
    for n in range(NUM_SAMPLES):
        sample = {"uid": f"u{n}", "instance_id": n // GROUP_SIZE, "messages": [], "reward": float(n % 2), **arrays}
        sample["loss_mask"] = array("B", b"\1" * num_tokens)
        if has_arrays:
            ROUTES[0, 0] = n  # each part has bytes of its own
            sample["arrays"] = {"routed_experts": Rows(ROUTES, [(0, num_tokens - 1)])}
        yield sample


def write(run: NativeRun, num_tokens: int = NUM_TOKENS, *, has_arrays: bool = True) -> float:
    began_s = time.perf_counter()
    run.send(samples(num_tokens, has_arrays=has_arrays))
    return time.perf_counter() - began_s


def token_read(run: NativeRun) -> float:
    """Seconds of a reply with the tokens alone, to its last byte."""
    run.client.post(f"{run.path}/rewind", json={"step": None}).raise_for_status()
    request = post(f"{run.path}/batches", b'{"num_groups": %d}' % NUM_GROUPS)
    accepting = request.replace(b"\r\n\r\n", f"\r\naccept: {TENSORS_TYPE}\r\n\r\n".encode(), 1)
    return request_seconds(run.server.url, accepting)[0]


def client_seconds(run: NativeRun, *, of_arrays: bool) -> float:
    """Seconds of ``arrays()``, or of ``read`` of a batch as tensors."""
    run.client.post(f"{run.path}/rewind", json={"step": None}).raise_for_status()
    with BufferClient(run.server.url, as_tensors=True) as client:
        client.attach(run.run_id)
        began_s = time.perf_counter()
        batch = client.read(NUM_GROUPS)
        read_s = time.perf_counter()
        assert batch is not None
        if not of_arrays:
            return read_s - began_s
        arrays = client.arrays(batch, batch.rows, needs=["routed_experts"])
        assert sum(each["routed_experts"].data.nbytes for each in arrays) == ARRAY_BYTES
        return time.perf_counter() - read_s


def small_p99(run: NativeRun, *, has_arrays: bool) -> float:
    """Seconds of a small write beside a writer of 20 samples per second: 30 MB of arrays."""
    is_over, took_s = threading.Event(), []

    def large() -> Iterator[Json]:
        for n in count():
            if is_over.wait(0.05):
                return
            yield next(samples(NUM_TOKENS, has_arrays=has_arrays)) | {"uid": f"w{n}", "instance_id": n // GROUP_SIZE}

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(run.send, large())
        for _ in range(300):
            began_s = time.perf_counter()
            run.write(make_sample())
            took_s.append(time.perf_counter() - began_s)
        is_over.set()
        sending.result()
    return quantiles(took_s, n=100)[-1]


def test_side_arrays_leave_the_rest_as_fast_as_it_was(make_server: MakeServer) -> None:
    server = make_server(log_level="warning")
    took_s: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in AT_MOST}
    reads, fetched, p99, written = took_s.values()
    for _ in range(ROUNDS):
        full, bare, large, *beside = (server.start_run(group_size=GROUP_SIZE) for _ in range(5))
        written[0].append(write(full))
        written[1].append(write(large, PLAIN_TOKENS, has_arrays=False))
        write(bare, has_arrays=False)
        for _ in range(READS):
            reads[0].append(token_read(full))
            reads[1].append(token_read(bare))
        for _ in range(3):
            fetched[0].append(client_seconds(full, of_arrays=True))
            fetched[1].append(client_seconds(large, of_arrays=False))
        for has_arrays, seconds, run in zip((True, False), p99, beside, strict=True):
            seconds.append(small_p99(run, has_arrays=has_arrays))
    medians = {name: (median(one), median(other)) for name, (one, other) in took_s.items()}
    rows = [(name, 1e3 * one, 1e3 * other, one / other, AT_MOST[name]) for name, (one, other) in medians.items()]
    title = f"{NUM_SAMPLES} samples of {NUM_TOKENS} tokens, {ARRAY_BYTES >> 20} MiB of arrays, in ms"
    show(title, ("", "with arrays", "without", "ratio", "at most"), rows)
    assert [name for name, _, _, ratio, most in rows if ratio > most] == []
