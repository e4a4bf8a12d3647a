"""Bodies with changed bytes and values, at every route of the server that takes one: refused or taken, never a 5xx.

What was acknowledged is delivered, and can be decoded; nothing else is.
"""

import gzip
import json
import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import zstandard

from forebay.core.binary_sample import SAMPLES_TYPE, float_bytes, int_bytes, join_samples, mask_bytes, pack
from tests.attack.asking import Asker
from tests.attack.mutations import mutated, mutated_json
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, make_sample, write_generator
from tests.lent import lend_runs, lent_url

ROUNDS = float(os.environ.get("ROUNDS", "1"))
NDJSON = {"Content-Type": "application/x-ndjson"}
BINARY = {"Content-Type": SAMPLES_TYPE}
Send = Callable[["Attack"], None]

ENDS_AT_ONCE = """
TASK_TYPE = "brief"
def run_rollout(data):
    pass
"""


class Attack:
    """One run with groups of one sample, and the connection over which it is attacked."""

    def __init__(self, server: ServerProcess, run: NativeRun, seed: int) -> None:
        self.run = run
        self.key_path = "/w/" + lent_url(server, run.run_id).rpartition("/")[2]
        self.rng = random.Random(seed)
        self.asker = Asker("127.0.0.1", server.port)
        self.num_asked = 0

    def sample(self) -> Json:
        self.num_asked += 1
        names = {"epoch": 0, "slot": 0, "rollout_id": f"r-{self.num_asked}", "response_length": 2}
        return make_sample(instance_id=f"i-{self.num_asked}", tokens=[1, 2, 3], loss_mask=[1, 1], **names)

    def post(self, path: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        with suppress(OSError):  # a connection that the server closed is opened anew
            self.asker.ask("POST", path, body, headers)


def one_sample(attack: Attack) -> None:
    attack.post(f"{attack.run.path}/samples", mutated_json(attack.rng, attack.sample()))


def a_sample_of_slime(attack: Attack) -> None:
    attack.post(f"{attack.key_path}/buffer/write", mutated_json(attack.rng, attack.sample()))


def an_array(attack: Attack) -> None:
    body = mutated_json(attack.rng, [attack.sample() for _ in range(4)])
    attack.post(f"{attack.key_path}/samples", body)


def lines(attack: Attack) -> None:
    body = b"\n".join(mutated_json(attack.rng, attack.sample()) for _ in range(4))
    attack.post(f"{attack.run.path}/samples", mutated(attack.rng, body), NDJSON)


def binary_samples(attack: Attack) -> None:
    attack.post(f"{attack.run.path}/samples", mutated(attack.rng, binary(attack)), BINARY)


def binary_samples_of_json(attack: Attack) -> None:
    """The lengths are right, and what they enclose is not."""
    attack.post(f"{attack.run.path}/samples", join_samples([mutated(attack.rng, packed(attack))]), BINARY)


def compressed(attack: Attack) -> None:
    coding, compress = attack.rng.choice((("gzip", gzip.compress), ("zstd", zstandard.compress)))
    body = compress(mutated_json(attack.rng, attack.sample()))
    if attack.rng.random() < 0.7:
        body = mutated(attack.rng, body)
    attack.post(f"{attack.run.path}/samples", body, {"Content-Encoding": coding})


def a_read(attack: Attack) -> None:
    kinds = ("application/json", "application/vnd.forebay.tensors", "*/*")
    asked = {"num_groups": 2, "wait_s": 0, "lease_s": 60, "step": 1, "max_staleness": 2, "request_id": "r"}
    path, body = attack.rng.choice(((f"{attack.run.path}/batches", asked), ("/get_rollout_data", {"batch_size": 2})))
    attack.post(path, mutated_json(attack.rng, body), {"Accept": attack.rng.choice(kinds)})


def a_report(attack: Attack) -> None:
    paths: tuple[tuple[str, Json], ...] = (
        (f"{attack.key_path}/progress", {"opened": [["i-1", 0]], "process_id": "p", "counts": {"rollouts": 1}}),
        (f"{attack.run.path}/checkpoints", {"step": 1, "batch_ids": []}),
        (f"{attack.run.path}/rewind", {"step": 1}),
        (f"{attack.run.path}/engines/pause", {"mode": "abort", "limit_s": 1}),
        (f"{attack.run.path}/engines/continue", {"weight_version": 1}),
        (f"{attack.run.path}/batches/b-1/extend", {"lease_s": 10}),
    )
    path, body = attack.rng.choice(paths)
    attack.post(path, mutated_json(attack.rng, body))


def a_start(attack: Attack) -> None:
    body = {
        "task_type": "brief",
        "num_repeat_per_sample": "2",
        "num_epoch": 1,
        "input_file": "rows.jsonl",
        "skip_instance_ids": ["a", 1],
        "remote_engine_url": "http://127.0.0.1:9",
        "sampling_params": {"top_p": 1},
        "name": "n",
        "start_id": "s",
        "group_timeout_seconds": 30,
        "oversampling": {"rollouts_per_group": 3},
    }
    attack.post(attack.rng.choice(("/start_rollout", "/v1/runs", "/s/x/start_rollout")), mutated_json(attack.rng, body))


def packed(attack: Attack) -> bytes:
    sample = attack.sample()
    arrays = int_bytes([1, 2, 3], "i"), float_bytes([-0.5, -0.25]), mask_bytes([1, 1])
    tokens, logprobs, mask = (array or b"" for array in arrays)
    json_part = {name: value for name, value in sample.items() if name not in ("tokens", "loss_mask")}
    return pack(json.dumps(json_part).encode(), tokens, logprobs, mask)


def binary(attack: Attack) -> bytes:
    return join_samples([packed(attack) for _ in range(3)])


ATTACKS: tuple[tuple[Send, int], ...] = (
    (one_sample, 12_000),
    (a_sample_of_slime, 8_000),
    (an_array, 4_000),
    (lines, 6_000),
    (binary_samples, 9_000),
    (binary_samples_of_json, 5_000),
    (compressed, 3_000),
    (a_read, 2_000),
    (a_report, 3_000),
    (a_start, 500),
)
"""How many of each: 52 500 in all."""


@pytest.fixture(scope="module")
def attacked(module_servers: MakeServer) -> Iterator[ServerProcess]:
    """A server that makes nobody wait."""
    server = module_servers(max_wait_s=0.02, write_wait_s=0, refuse_hold_s=0, start_wait_s=1)
    write_generator(server.generators, ENDS_AT_ONCE, "brief_generator.py")
    lend_runs(server)
    (server.directory / "rows.jsonl").write_text('{"prompt": "2+2?"}\n')
    server.start_slime(group_size=1)
    yield server
    assert server.client.get("/readyz").status_code == 200
    assert "Traceback" not in server.log(1 << 24)


@pytest.mark.parametrize(("send", "count"), ATTACKS, ids=lambda part: getattr(part, "__name__", ""))
def test_no_body_is_a_server_error_and_what_was_taken_can_be_read(
    attacked: ServerProcess, send: Send, count: int
) -> None:
    run = attacked.start_run("lent", group_size=1, input_file="rows.jsonl")
    attack = Attack(attacked, run, seed=count)
    for _ in range(int(count * ROUNDS)):
        send(attack)
    assert not attack.asker.bad, attack.asker.bad[0]
    assert attack.asker.statuses.total() >= 0.99 * count * ROUNDS  # nearly all had an answer
    attack.asker.close()
    before = run.view()["groups"]["ready"]
    assert read_all(run) == before
    run.stop()


def read_all(run: NativeRun) -> int:
    """How many groups are delivered; each row of them is whole."""
    num_groups = 0
    while num_read := (batch := run.read(num_groups=500, wait_s=0)).get("num_groups", 0):
        num_groups += num_read
        assert all(math.isfinite(row["reward"]) and row["uid"] for row in batch["data"])
    return num_groups
