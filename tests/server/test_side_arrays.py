"""Side arrays: written with samples, stored in parts beside them, and read back bit by bit."""

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy
import pytest

from forebay.client import Batch, BufferClient, Limits, Rows, SamplesRefused, SampleWriter
from forebay.client.sample_writer.encode import SAMPLES_TYPE, encode_sample, join_samples
from forebay.core.errors import InvalidInput, LeaseLost
from forebay.core.parts import ArrayRows, NamedPart, PartsGone, Tensor, pack_arrays
from forebay.replay.recording import Recording
from forebay.server.cli.client import ServerClient
from forebay.server.cli.recordings.recording_download import export_run
from tests.conftest import MakeServer
from tests.kit import (
    IDLE,
    Json,
    NativeRun,
    ServerProcess,
    assert_error,
    damage,
    make_sample,
    metric,
    poll_until,
    write_generator,
)

RUN = {"group_size": 2}
ROW_BYTES = 20_000
STORED = "forebay_journal_bytes"


def routes(seed: int) -> Rows:
    """Random routes of the first eight tokens."""
    return Rows(numpy.random.default_rng(seed).integers(0, 256, (8, ROW_BYTES), dtype="uint8"), [(0, 8)])


def masks() -> Rows:
    """Kept sets of every second token."""
    lengths = numpy.arange(4, dtype="int32")
    return Rows(numpy.arange(6, dtype="int32"), [(at, at + 1) for at in range(1, 9, 2)], lengths)


def sample_of(instance_id: str, number: int, **fields: Any) -> Json:
    """A sample of nine tokens."""
    tokens = {"tokens": list(range(9)), "logprobs": [-0.5] * 9, "loss_mask": [1] * 9}
    named = {"uid": f"{instance_id}/{number}", "instance_id": instance_id, "reward": float(number % 2)}
    return make_sample(**tokens, **named, **fields)


def write_group(run: NativeRun, instance_id: str) -> None:
    run.send(sample_of(instance_id, slot, arrays={"routes": routes(slot)}) for slot in range(2))


def post(run: NativeRun, *frames: bytes) -> list[Json]:
    reply = run.client.post(f"{run.path}/samples", content=join_samples(frames), headers={"Content-Type": SAMPLES_TYPE})
    assert reply.status_code == 200, reply.text
    results: list[Json] = reply.json()["results"]
    return results


def read(client: BufferClient, num_groups: int = 1) -> Batch:
    batch = client.read(num_groups=num_groups)
    assert batch is not None
    return batch


@pytest.fixture
def client(run: NativeRun) -> Iterator[BufferClient]:
    with BufferClient(run.server.url) as client:
        client.attach(run.run_id)
        yield client


def assert_same(found: Rows, given: Rows) -> None:
    assert (found.data.dtype, found.tokens) == (given.data.dtype, given.tokens)
    assert numpy.array_equal(found.data, given.data)
    assert (found.lengths is None) == (given.lengths is None)
    assert found.lengths is None or numpy.array_equal(found.lengths, given.lengths)


def test_arrays_come_back_bit_by_bit_also_after_kills_amid_writes(make_server: MakeServer) -> None:
    server, num_groups = make_server(), 30
    run = server.start_run(group_size=2)

    def write_all() -> None:
        with SampleWriter(server.url, run.run_id, limits=Limits(max_samples=3)) as writer:
            for number in range(2 * num_groups):
                arrays = {"routes": routes(number), "masks": masks()}
                writer.write(sample_of(f"{number // 2}", number, arrays=arrays))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_all)
        for part in (0.2, 0.5, 0.8):
            poll_until(lambda part=part: len(run.groups(limit=1000)) >= part * num_groups)
            server.kill9()
            server.restart()
        writing.result(60)
    with BufferClient(server.url) as client:
        client.attach(run.run_id)
        batch = read(client, num_groups)
        assert len(batch.rows) == 2 * num_groups
        for row, arrays in zip(batch.rows, client.arrays(batch, batch.rows), strict=True):
            assert arrays.keys() == {"routes", "masks"}
            assert_same(arrays["routes"], routes(int(row["uid"].partition("/")[2])))
            assert_same(arrays["masks"], masks())
        client.ack(batch)
        # Also after the ack, by id, and for the rows of one rank.
        [again] = client.arrays(batch.batch_id, batch.rows[1:2], ["routes"], needs=["masks"])
        assert_same(again["masks"], masks())
        with pytest.raises(InvalidInput, match="2 samples lack the array teacher"):
            client.arrays(batch, batch.rows[:2], needs=["teacher"])
    assert "parts" not in run.view()["samples"]
    assert {sample["outcome"] for sample in run.group(batch.group_ids[0])["samples"]} == {"member"}


def test_forks_share_the_part_of_their_rollout_and_late_and_surplus_samples_store_none(
    run: NativeRun, client: BufferClient
) -> None:
    data = os.urandom(8 * 100_000)
    part = pack_arrays({"routes": Tensor("U8", (8, 100_000), data)})
    place = {"epoch": 0, "slot": 0, "rollout_id": "r"}

    def rows(*stretches: tuple[int, int, int, int]) -> Json:
        return {"routes": ArrayRows("U8", (100_000,), [*stretches])}

    forks = [sample_of("a", n, fork=n, parts=[part], arrays=rows((0, 0, 0, 4)), **place) for n in range(1, 4)]
    forks.append(sample_of("a", 4, fork=4, parts=[part, part], arrays=rows((0, 0, 0, 2), (1, 2, 2, 4)), **place))
    before = metric(run.server, STORED)
    # The bytes alone are the same part.
    whole = sample_of("a", 0, parts=[bytes(part.data)], arrays=rows((0, 0, 0, 8)), **place)
    run.send([*forks, whole, sample_of("a", 9, epoch=0, slot=1)])
    batch = read(client)
    *arrays, without = client.arrays(batch, batch.rows)
    assert [each["routes"].data.tobytes() for each in arrays] == [data, *4 * [data[: len(data) // 2]]]
    assert (without, [each["routes"].tokens for each in arrays]) == ({}, [[(0, 8)], *4 * [[(0, 4)]]])
    assert metric(run.server, STORED) - before < 1.05 * len(data)
    run.send([sample_of("b", 0, epoch=0, slot=0)])
    other = {**place, "rollout_id": "another", "fork": 1, "parts": [part], "arrays": rows((0, 0, 0, 8))}
    run.send(sample_of(instance, 8, **other) for instance in ("a", "b"))
    assert run.view()["samples"]["late"] == run.view()["samples"]["surplus"] == 1
    assert metric(run.server, STORED) - before < 1.1 * len(data)


def test_bad_parts_are_refused_for_their_sample_alone(run: NativeRun) -> None:
    part, image = pack_arrays({"routes": Tensor("U8", (8, 2), bytes(16))}), NamedPart.of(b"not safetensors")
    named = {"parts": [part.digest], "arrays": {"routes": ArrayRows("U8", (2,), [(0, 0, 0, 8)])}}
    far = {**named, "arrays": {"routes": ArrayRows("U8", (2,), [(0, 0, 2, 10)])}}
    tensor = {"dtype": "U8", "shape": [800, 2], "data_offsets": [0, 1600]}
    header = json.dumps({"routes": tensor, "other": tensor}).encode()
    doubled = NamedPart.of(len(header).to_bytes(8, "little") + header + bytes(1600))
    good = encode_sample(sample_of("a", 0, **named))
    results = post(
        run,
        *(each.frame for each in (part, image, doubled)),
        good,
        encode_sample(sample_of("a", 1, parts=[image.digest])),
        encode_sample(sample_of("b", 0, **far)),
        encode_sample(make_sample(instance_id="c", **named)),
        *(encode_sample(sample_of("d", n, **{**named, "parts": [e.digest]})) for n, e in enumerate((image, doubled))),
    )
    assert [result["status"] for result in results] == [200, 200, 422, 422, 422, 422]
    assert {result["error"]["field"] for result in results[2:]} == {"arrays.routes"}
    assert "tokens 2 to 10 must lie between 0 and 9" in results[2]["error"]["message"]
    for frames in ([], [part.frame[:-1] + b"\1"]):
        [result] = post(run, *frames, encode_sample(sample_of("e", 0, **named)))
        assert (result["status"], result["error"]["field"]) == (422, "parts")
    # A sample that is written again is a duplicate, whatever its parts.
    assert post(run, part.frame, good)[0]["duplicate"]


def test_more_bytes_than_a_sample_may_have_are_refused_with_the_setting(server: ServerProcess) -> None:
    run = server.start_run(group_size=1, max_array_bytes=1_000)
    with pytest.raises(SamplesRefused, match="the parts of a sample are larger than 1000 bytes") as refused:
        run.send([sample_of("a", 0, arrays={"routes": routes(0)})])
    assert "max_array_bytes" in refused.value.hint
    run.send([sample_of("a", 0, arrays={"masks": masks()})])


def test_parts_are_read_by_batch_and_by_group(run: NativeRun) -> None:
    given = [os.urandom(10), b"", os.urandom(400_000)]
    parts = [NamedPart.of(each) for each in given]
    digests = [part.digest for part in parts]
    samples = [encode_sample(sample_of("a", slot, parts=digests)) for slot in range(2)]
    post(run, *(part.frame for part in parts), *samples)
    batch = run.read(num_groups=1)

    def read(**body: Any) -> httpx.Response:
        return run.client.post(f"{run.path}/batches/{batch['batch_id']}/parts", json=body)

    reply = read(parts=[digests[2], digests[0], digests[1], digests[0]])
    order = [given[2], given[0], given[1], given[0]]
    assert reply.content == b"".join(len(each).to_bytes(8, "little") + each for each in order)
    assert reply.headers["Content-Type"] == "application/vnd.forebay.parts"
    for digest, data in zip(digests, given, strict=True):
        one = run.client.get(f"{run.path}/groups/{batch['group_ids'][0]}/parts/{digest}")
        assert (one.content, one.headers["X-Content-Type-Options"]) == (data, "nosniff")
    assert_error(read(parts=["f" * 32]), 404, "part_not_found")
    assert_error(read(parts=1), 422, "invalid_input", "parts")
    assert_error(run.client.post(f"{run.path}/batches/none/parts", json={"parts": []}), 404, "batch_not_found")
    run.release(batch)
    assert_error(read(parts=digests), 409, "lease_lost")


@pytest.mark.parametrize("keep_bodies", [False, True])
def test_parts_are_kept_for_rewinds_and_not_for_replays(module_servers: MakeServer, keep_bodies: bool) -> None:
    server = module_servers(segment_bytes=65_536)
    run = server.start_run(group_size=2, keep_checkpoints=2, keep_bodies=keep_bodies)
    with BufferClient(server.url) as client:
        client.attach(run.run_id)
        batches = []
        for step in range(6):
            write_group(run, f"{step}")
            batches.append(read(client))
            client.checkpoint(step)
        assert run.client.post("/v1/gc").status_code == 200
        for batch in batches[0 if keep_bodies else 4 :]:
            assert_same(client.arrays(batch, batch.rows)[0]["routes"], routes(0))
        for batch in batches[: 0 if keep_bodies else 3]:
            with pytest.raises(PartsGone):
                client.arrays(batch, batch.rows)
            # The samples themselves are kept, as without arrays.
            assert [sample["has_body"] for sample in run.group(batch.group_ids[0])["samples"]] == [True, True]
        client.rewind(4)
        again = read(client)
        assert_same(client.arrays(again, again.rows)[0]["routes"], routes(0))
        with pytest.raises(LeaseLost):
            client.arrays(batches[5], batches[5].rows)


def test_the_error_of_a_damaged_part_names_the_part(make_server: MakeServer) -> None:
    run, part = make_server().start_run(group_size=2), NamedPart.of(os.urandom(1_000))
    post(run, part.frame, *(encode_sample(sample_of("a", slot, parts=[part.digest])) for slot in range(2)))
    damage(run.server.data_dir, bytes(part.data))
    damaged = run.client.get(f"{run.path}/groups/{run.groups()[0]['group_id']}/parts/{part.digest}")
    message = assert_error(damaged, 507, "body_unreadable")["message"]
    assert message.startswith(f"a stored body cannot be read: part {part.digest}: segment 1: bytes")


CUTS = f"""{IDLE.replace('"idle"', '"cuts"')}
def normalize_group_data(group, epsilon=1e-8, algo="grpo"):
    instance_id, items = group
    items[0]["tokens"] = items[0]["tokens"][1:]
    return instance_id, items
"""


def test_a_row_whose_tokens_a_hook_changes_has_no_arrays(make_server: MakeServer, tmp_path: Path) -> None:
    write_generator(tmp_path, CUTS, "cuts_generator.py")
    run = make_server(generators=tmp_path).start_run("cuts", group_size=2)
    write_group(run, "a")
    with BufferClient(run.server.url) as client:
        client.attach(run.run_id)
        batch = read(client)
        assert [list(arrays) for arrays in client.arrays(batch, batch.rows)] == [[], ["routes"]]
        assert "side arrays" in batch.meta_info["warning"]


def test_recordings_and_replays_have_no_arrays(run: NativeRun, client: BufferClient, tmp_path: Path) -> None:
    write_group(run, "a")
    run.take(num_groups=1)
    run.stop()
    with ServerClient(run.server.url) as server:
        export_run(server, run.run_id, path := tmp_path / "run.fbr")
    with Recording.open(path) as recording:
        [group] = recording.groups()
        assert (recording.made.num_samples, len(recording.samples(group.group_id)), recording.verify()) == (2, 2, [])
    client.start(replay=run.run_id)
    batch = read(client)
    assert client.arrays(batch, batch.rows) == [{}, {}]
    assert {row["parts"] for row in batch.rows} == {None}


def test_the_page_on_arrays_runs(run: NativeRun) -> None:
    page = (Path(__file__).parents[2] / "docs" / "arrays.md").read_text(encoding="utf-8")
    blocks = {
        code.partition("\n")[0]: code for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    }
    names: dict[str, Any] = {"run_id": run.run_id}
    for first in ("import numpy", "from forebay.client import BufferClient"):
        exec(blocks[first].replace("http://127.0.0.1:8889", run.server.url), names)
    assert names["routes"].shape == (10, 384)
    assert (names["routes"][9] == -1).all()
    assert (names["ids"].tolist(), names["offsets"].tolist()) == ([104, 7, 105], [0, 0, 0, 0, 0, 2, 3, 3, 3, 3, 3])
