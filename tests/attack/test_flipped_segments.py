"""Bits that flip in stored segments: no wrong byte is delivered, every start succeeds, and what is lost is told.

More than 200 of them, in headers, rows, checksums and bodies, of samples as JSON and as arrays, while the server runs
and between two of its lives, read over every route that hands samples out.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle, pairwise
from pathlib import Path

import httpx
import pytest
import safetensors.torch

from forebay.buffer.reads.selection import ReadRequest
from forebay.buffer.store.journal import JournalStore
from forebay.client.sample_writer.encode import SAMPLES_TYPE, encode_sample, join_samples
from forebay.core.errors import BodyUnreadable, StorageFailed
from forebay.core.safetensors_format import TENSORS_TYPE
from tests.buffer.buffer_kit import check_books, fill, make_run, open_buffer, read, rows_of, states
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, SlimeRun, assert_error, make_sample

GROUP_SIZE = 4
NUM_GROUPS = 40
NUM_FLIPS = 50
"""In each life of a server; there are four of them."""
LENGTHS = (50, 50, 5_000, 70_000, 300_000)
"""Of the texts, and a fourth of the number of tokens: what is sent together, alone, and in parts."""
CHECKSUM_BYTES = 8
SEGMENT_BYTES = 4 << 20
MOST_READS = 200
NUM_ROUNDS = 40
FLIPS_PER_ROUND = 6


@dataclass
class Written:
    """What was written, by uid."""

    rng: random.Random
    samples: dict[str, Json] = field(default_factory=dict)
    bodies: dict[str, bytes] = field(default_factory=dict)

    def groups(self, name: str, make: Callable[[str, int, int], Json]) -> Iterator[list[Json]]:
        """New groups, one after the other."""
        for number in range(NUM_GROUPS):
            length = self.rng.choice(LENGTHS)
            group = [make(f"{name}{number}", slot, length) for slot in range(GROUP_SIZE)]
            self.samples.update({sample["uid"]: sample for sample in group})
            yield group

    def check(self, row: Json) -> str:
        """Raise ``AssertionError`` unless a delivered row is what was written; its uid."""
        sample = self.samples[row["uid"]]
        # Not `==` in the assertion: the difference of two long texts takes minutes to print.
        has_rewards = row["raw_reward"] == sample["reward"] and abs(row["reward"] - (2 * sample["reward"] - 1)) < 1e-5
        assert has_rewards, (row["uid"], row["reward"], row["raw_reward"])
        wrong = [name for name in {*row, *sample} - {"reward", "raw_reward"} if row.get(name) != sample.get(name)]
        assert not wrong, (row["uid"], wrong)
        return str(row["uid"])

    def text_sample(self, instance: str, slot: int, length: int) -> Json:
        text = self.rng.randbytes(length // 2).hex()
        return make_sample(uid=f"{instance}/{slot}", instance_id=instance, reward=float(slot % 2), text=text)

    def token_sample(self, instance: str, slot: int, length: int) -> Json:
        tokens = [self.rng.randrange(1 << 17) for _ in range(max(2, length // 4))]
        arrays = {"tokens": tokens, "logprobs": [-t / 8 for t in tokens], "loss_mask": [t % 2 for t in tokens]}
        return make_sample(uid=f"{instance}/{slot}", instance_id=instance, reward=float(slot % 2), **arrays)


def write_text(run: NativeRun, written: Written, name: str) -> None:
    """Groups whose samples are JSON."""
    for group in written.groups(name, written.text_sample):
        bodies = [json.dumps(sample).encode() for sample in group]
        content = b"[" + b",".join(bodies) + b"]"
        run.client.post(f"{run.path}/samples", content=content).raise_for_status()
        written.bodies.update({sample["uid"]: body for sample, body in zip(group, bodies, strict=True)})


def write_tokens(run: NativeRun, written: Written, name: str) -> None:
    """Groups whose samples have arrays."""
    for group in written.groups(name, written.token_sample):
        bodies = [encode_sample(sample) for sample in group]
        headers = {"Content-Type": SAMPLES_TYPE}
        run.client.post(f"{run.path}/samples", content=join_samples(bodies), headers=headers).raise_for_status()
        written.bodies.update({sample["uid"]: body for sample, body in zip(group, bodies, strict=True)})


def segments_of(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "segments").glob("*.log"))


def flip(data_dir: Path, rng: random.Random, count: int = NUM_FLIPS) -> list[tuple[Path, int]]:
    """Flip a bit at each of so many places, by a descriptor of its own; where."""
    paths = segments_of(data_dir)
    sizes = [path.stat().st_size for path in paths]
    places = []
    for _ in range(count):
        [path] = rng.choices(paths, sizes)
        offset = rng.randrange(path.stat().st_size)
        with path.open("r+b") as file:
            file.seek(offset)
            [byte] = file.read(1)
            file.seek(offset)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        places.append((path, offset))
    return places


def damaged_instances(before: dict[Path, bytes], written: Written, places: list[tuple[Path, int]]) -> set[str]:
    """The instances of which a body, or its checksum, has a bit that flipped."""
    damaged = set()
    for uid, body in written.bodies.items():
        for path, data in before.items():
            if (start := data.find(body)) >= 0:
                lies = range(start - CHECKSUM_BYTES, start + len(body))
                if any(path == flipped and offset in lies for flipped, offset in places):
                    damaged.add(uid.rpartition("/")[0])
                break
        else:
            raise AssertionError(f"the body of {uid} is in no segment")
    return damaged


# --- reading all that is there


def told(response: httpx.Response) -> httpx.Response:
    """Raise ``BodyUnreadable`` if that is what the server says, and nothing else but success."""
    if response.status_code == 507:
        raise BodyUnreadable(assert_error(response, 507, "body_unreadable")["message"])
    assert response.is_success, response.text
    return response


def read_json(run: NativeRun, num_groups: int) -> list[Json]:
    """The rows of a batch as JSON, acknowledged."""
    batch = told(run.client.post(f"{run.path}/batches", json={"num_groups": num_groups})).json()
    if batch["batch_id"] is None:
        return []
    run.ack(batch)
    rows: list[Json] = batch["data"]
    return rows


def read_tensors(run: NativeRun, num_groups: int) -> list[Json]:
    """The same rows out of tensors."""
    asked = {"json": {"num_groups": num_groups}, "headers": {"Accept": TENSORS_TYPE}}
    response = run.client.post(f"{run.path}/batches", **asked)  # type: ignore[arg-type]
    if told(response).headers["Content-Type"] != TENSORS_TYPE:
        assert response.json()["batch_id"] is None
        return []
    tensors = {name: tensor.tolist() for name, tensor in safetensors.torch.load(response.content).items()}
    rest = json.loads(bytes(tensors["rest"]))
    run.ack(rest)
    rows: list[Json] = rest["data"]
    for row, (start, end) in zip(rows, pairwise(tensors["offsets"]), strict=True):
        for name in ("tokens", "logprobs", "loss_mask") if end > start else ():
            row[name] = tensors[name][start:end]
    return rows


def read_slime(run: NativeRun, num_groups: int) -> list[Json]:
    """What slime's client gets: it is told of a failure, and asks again."""
    assert isinstance(run, SlimeRun)
    answer = run.fetch(batch_size=num_groups * GROUP_SIZE)
    rows: list[Json] = answer["data"]["data"]
    assert bool(rows) == answer["success"], answer["message"]
    return rows


def may_come(group: Json) -> bool:
    """Not an open group that lost a sample with its record: it waits for its deadline like any that is not full."""
    return group["state"] in ("ready", "leased") or (group["state"], group["num_samples"]) == ("open", GROUP_SIZE)


def read_all(run: NativeRun, written: Written, read: Callable[[NativeRun, int], list[Json]]) -> Counter[str]:
    """Read until no group is left that could be read; how often each uid was delivered."""
    delivered: Counter[str] = Counter()
    sizes = cycle((7, 1, 3))
    for _ in range(MOST_READS):
        left = [group for group in run.groups() if may_come(group)]
        if not left:
            return delivered
        try:
            rows = read(run, min(next(sizes), len(left)))
        except (httpx.RemoteProtocolError, httpx.ReadError, BodyUnreadable):  # nothing of it counts
            continue
        groups = Counter(written.check(row).rpartition("/")[0] for row in rows)
        assert {*groups.values()} <= {GROUP_SIZE}, "a group comes whole"
        delivered.update(row["uid"] for row in rows)
    raise AssertionError(f"groups are left: {left}")


# --- the attacks


@pytest.mark.parametrize("read_with", [read_json, read_tensors, read_slime])
def test_flips_under_a_running_server_cost_exactly_their_groups(
    make_server: MakeServer, read_with: Callable[[NativeRun, int], list[Json]]
) -> None:
    rng = random.Random(read_with.__name__)
    written = Written(rng)
    server = make_server(segment_bytes=SEGMENT_BYTES)
    is_slime = read_with is read_slime
    run = server.start_slime("s", group_size=GROUP_SIZE) if is_slime else server.start_run(group_size=GROUP_SIZE)
    write_text(run, written, "text")
    write_tokens(run, written, "tokens")
    before = {path: path.read_bytes() for path in segments_of(server.data_dir)}
    damaged = damaged_instances(before, written, flip(server.data_dir, rng))
    assert 5 < len(damaged) < NUM_GROUPS
    delivered = read_all(run, written, read_with)
    assert {*delivered.values()} == {1}
    assert {uid for uid in written.samples if uid.rpartition("/")[0] not in damaged} == {*delivered}
    lost = {group["instance_id"]: group["reason"] for group in run.groups(state="discarded")}
    assert lost == dict.fromkeys(damaged, "unreadable")
    assert "Traceback" not in server.log(1 << 20)


@pytest.mark.parametrize("keeps_index", [True, False])
def test_flips_between_two_lives_of_a_server_keep_it_neither_from_starting_nor_from_the_rest(
    make_server: MakeServer, keeps_index: bool
) -> None:
    rng = random.Random(keeps_index)
    written = Written(rng)
    server = make_server(segment_bytes=SEGMENT_BYTES)
    run = server.start_run(group_size=GROUP_SIZE, resume=False)
    write_text(run, written, "text")
    write_tokens(run, written, "tokens")
    server.kill9()
    flip(server.data_dir, rng)
    if not keeps_index:
        for path in server.data_dir.glob("index.sqlite*"):
            path.unlink()
    server.restart()
    try_all_views(server, run)
    delivered = read_all(run, written, read_tensors if keeps_index else read_json)
    assert {*delivered.values()} == {1}
    assert len(delivered) > len(written.samples) / 2, "damage costs what it touches, not the rest"
    assert "Traceback" not in server.log(1 << 20)


def try_all_views(server: ServerProcess, run: NativeRun) -> None:
    """What people look at answers, whatever is damaged."""
    for group in run.groups()[::10]:
        path = f"{run.path}/groups/{group['group_id']}"
        assert server.client.get(path).is_success
        assert server.client.get(path, params={"bodies": True}).status_code in (200, 507)


async def test_a_log_with_flips_anywhere_opens_and_delivers_nothing_wrong(tmp_path: Path) -> None:
    """Small records, so that headers and rows are hit as often as bodies; read once more without the index."""
    rng = random.Random(12)
    num_delivered = 0
    for number in range(NUM_ROUNDS):
        path = tmp_path / str(number)
        async with open_buffer(JournalStore(path, segment_bytes=6_000)) as buffer:
            entry = await buffer.add(make_run(group_size=2))
            for instance in range(12):
                await fill(entry, instance, [0.0, 1.0], text=f"text of {instance}")
                if instance == 6:
                    acked = await entry.delivery.read(request_of(2))
                    assert acked is not None
                    await entry.delivery.leases.ack(acked.batch_id)
                    assert await entry.delivery.read(request_of(2)) is not None
        flip(path, rng, FLIPS_PER_ROUND)
        if number % 2:
            (path / "index.sqlite").unlink()
        async with open_buffer(JournalStore(path)) as buffer:
            for entry in buffer.entries:
                for _ in range(30):
                    try:
                        batch = await read(entry, is_slime=True)
                    except StorageFailed:
                        continue
                    if batch is None:
                        break
                    rows = rows_of(batch)
                    assert all(row["text"] == f"text of {row['instance_id']}" for row in rows)
                    assert {*Counter(row["instance_id"] for row in rows).values()} == {2}
                    num_delivered += len(rows)
                    entry.delivery.leases.ack_soon(batch.batch_id)
                assert not any(state == "ready" for state in states(entry).values())
                check_books(entry)
    assert num_delivered > 10 * NUM_ROUNDS


def request_of(num_groups: int) -> ReadRequest:
    return ReadRequest(num_groups=num_groups)
