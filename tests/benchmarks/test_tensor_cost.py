"""1 024 samples of 8 000 tokens from a writer into padded tensors, against JSON, and against a loopback transfer."""

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import msgspec
import pytest
import torch

from forebay.client import BufferClient
from forebay.client.tensors import collate
from forebay.core.safetensors_format import TENSORS_TYPE
from tests.benchmarks.load import post
from tests.benchmarks.machines import loopback_seconds, proof_seconds, request_seconds, show
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun

pytestmark = pytest.mark.bench

ROUNDS = 3
BARE_READS = 5
"""In each round: a read takes some 30 ms, and one of them may meet whatever else the machine does."""
NUM_SAMPLES, NUM_TOKENS, GROUP_SIZE = 1_024, 8_000, 8
NUM_GROUPS = NUM_SAMPLES // GROUP_SIZE
NUM_BYTES = NUM_SAMPLES * NUM_TOKENS * 9
"""int32 tokens, float32 logprobs and a uint8 loss mask."""
MIN_TIMES_FASTER = 8.0
MAX_READ_RATIO = 3.0
"""Times a loopback transfer; one pass over the bytes comes on top, since each body is proved before it is sent."""

TOKENS = array("i", (n * 7_919 % 150_000 for n in range(NUM_TOKENS)))
LOGPROBS = array("f", (-(n % 997) / 331 for n in range(NUM_TOKENS)))
LOSS_MASK = array("B", (n % 16 > 3 for n in range(NUM_TOKENS)))
ARRAYS: Json = {"tokens": TOKENS, "logprobs": LOGPROBS, "loss_mask": LOSS_MASK}
LISTS: Json = {name: values.tolist() for name, values in ARRAYS.items()}


@dataclass
class Took:
    """Seconds of each leg."""

    write_s: float
    read_s: float
    collate_s: float

    @property
    def total_s(self) -> float:
        return self.write_s + self.read_s + self.collate_s


def samples(arrays: Json) -> Iterator[Json]:
    for n in range(NUM_SAMPLES):
        yield {"uid": f"u{n}", "instance_id": n // GROUP_SIZE, "messages": [], "reward": float(n % 2), **arrays}


def ours(run: NativeRun) -> Took:
    began_s = time.perf_counter()
    run.send(samples(ARRAYS))
    written_s = time.perf_counter()
    with BufferClient(run.server.url, as_tensors=True) as client:
        client.attach(run.run_id)
        batch = client.read(NUM_GROUPS)
        assert batch is not None
        read_s = time.perf_counter()
        tensors = collate(batch, pad_token_id=0)
        done_s = time.perf_counter()
        client.ack(batch)
    check(tensors["tokens"], tensors["logprobs"], tensors["loss_mask"])
    return Took(written_s - began_s, read_s - written_s, done_s - read_s)


def by_json(run: NativeRun) -> Took:
    """The same with the fastest JSON there is, in requests as large."""
    began_s = time.perf_counter()
    some: list[Json] = []
    for sample in samples(LISTS):
        some.append(sample)
        if len(some) == 64:
            headers = {"Content-Type": "application/json"}
            run.client.post(
                f"{run.path}/samples", content=msgspec.json.encode(some), headers=headers
            ).raise_for_status()
            some = []
    written_s = time.perf_counter()
    response = run.client.post(f"{run.path}/batches", json={"num_groups": NUM_GROUPS})
    rows = msgspec.json.decode(response.content)["data"]
    read_s = time.perf_counter()
    tensors = [torch.tensor([row[name] for row in rows]) for name in LISTS]
    done_s = time.perf_counter()
    check(*tensors)
    return Took(written_s - began_s, read_s - written_s, done_s - read_s)


def check(tokens: torch.Tensor, logprobs: torch.Tensor, loss_mask: torch.Tensor) -> None:
    shape = (NUM_SAMPLES, NUM_TOKENS)
    assert torch.equal(tokens, torch.tensor(LISTS["tokens"]).expand(shape))
    assert torch.equal(logprobs, torch.tensor(LISTS["logprobs"]).expand(shape))
    assert torch.equal(loss_mask.bool(), torch.tensor(LISTS["loss_mask"]).bool().expand(shape))


def bare_read(run: NativeRun) -> tuple[float, float]:
    """Seconds of a tensor reply to its last byte, read as bare as the loopback transfer of the same bytes beside it."""
    run.client.post(f"{run.path}/rewind", json={"step": None}).raise_for_status()
    request = post(f"{run.path}/batches", b'{"num_groups": %d}' % NUM_GROUPS)
    accepting = request.replace(b"\r\n\r\n", f"\r\naccept: {TENSORS_TYPE}\r\n\r\n".encode(), 1)
    took_s, size = request_seconds(run.server.url, accepting)
    assert NUM_BYTES < size < 1.1 * NUM_BYTES
    return took_s, loopback_seconds(size)


def test_arrays_cost_a_fraction_of_json_and_a_small_multiple_of_sending_them(make_server: MakeServer) -> None:
    server = make_server(log_level="warning")
    tensors, json, bare, floor, passes = [], [], [], [], []
    for _ in range(ROUNDS):
        run = server.start_run(group_size=GROUP_SIZE)
        tensors.append(ours(run))
        for _ in range(BARE_READS):
            read_s, floor_s = bare_read(run)
            bare.append(read_s)
            floor.append(floor_s)
            passes.append(proof_seconds(NUM_BYTES))
        json.append(by_json(server.start_run(group_size=GROUP_SIZE)))
    times_faster = median(took.total_s for took in json) / median(took.total_s for took in tensors)
    read_ratio, aim = median(bare) / median(floor), MAX_READ_RATIO + median(passes) / median(floor)
    others = [("the reply alone", *_ms(bare)), ("loopback transfer", *_ms(floor)), ("one pass", *_ms(passes))]
    _show(tensors, json, others)
    print(f"arrays are {times_faster:.1f} times faster than JSON (target {MIN_TIMES_FASTER});")
    print(f"the reply takes {read_ratio:.1f} times a loopback transfer (target {aim:.1f})")
    assert times_faster >= MIN_TIMES_FASTER
    assert read_ratio <= aim


def _ms(seconds: list[float]) -> tuple[float]:
    return (median(seconds) * 1e3,)


def _show(tensors: list[Took], json: list[Took], others: list[tuple[str, float]]) -> None:
    legs: list[tuple[str, Callable[[Took], float]]] = [
        ("write", lambda took: took.write_s),
        ("read", lambda took: took.read_s),
        ("padded tensors", lambda took: took.collate_s),
        ("together", lambda took: took.total_s),
    ]
    rows: list[tuple[str, object, object]] = [
        (name, *_ms([leg(took) for took in tensors]), *_ms([leg(took) for took in json])) for name, leg in legs
    ]
    rows += [(name, took_ms, "") for name, took_ms in others]
    show(f"{NUM_SAMPLES} samples of {NUM_TOKENS} tokens, {NUM_BYTES >> 20} MiB, in ms", ("", "arrays", "JSON"), rows)
