"""A data directory that an earlier version wrote, and whose server was killed, opens, and everything is still there."""

import json
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.engines.scripted import ScriptedEngine
from tests.earlier_data.earlier_kit import (
    ARCHIVE,
    EPOCHS,
    GROUP_SIZE,
    INPUT_NAME,
    INSTANCES,
    LEASED,
    STREAMS,
    NumberingEngine,
    look,
    make_folder,
    payload,
    ready_rows,
    rows,
)
from tests.kit import Json, NativeRun, ServerProcess, assert_error, make_sample
from tests.slime.trainer import Checkpoint, SlimeTrainer

PACKED = zipfile.ZipFile(ARCHIVE)
KNOWN: Json = json.loads(PACKED.read("answers.json"))
Change = Callable[[Path], object]


def without_index(data: Path) -> None:
    """As from a backup, which leaves it out."""
    for path in data.glob("index.sqlite*"):
        path.unlink()


def with_a_torn_end(data: Path) -> None:
    """A record has begun, and no more of it came to the disk."""
    last = max((data / "segments").glob("*.log"))
    with last.open("r+b") as log:
        beginning = log.read(60)
        log.seek(0, 2)
        log.write(beginning)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """On a copy of the directory; not started yet."""
    PACKED.extractall(tmp_path, (name for name in PACKED.namelist() if name.startswith("data/")))
    server = make_folder(tmp_path)
    yield server
    server.close()


def run_of(server: ServerProcess, name: str) -> NativeRun:
    return NativeRun(server, KNOWN["runs"][name])


def instances(told: list[str]) -> list[str | int]:
    return list(dict.fromkeys(json.loads(row)["instance_id"] for row in told))


@pytest.mark.parametrize(
    "change", [lambda _: None, without_index, with_a_torn_end], ids=["as_it_is", "no_index", "torn"]
)
def test_runs_groups_batches_and_samples_are_what_they_were(server: ServerProcess, change: Change) -> None:
    change(server.data_dir)
    server.start()
    for name, before in KNOWN["looks"].items():
        assert _known_part(look(run_of(server, name)), before) == before, name
    states = Counter(group["state"] for group in KNOWN["looks"]["books"]["all_groups"])
    assert set(states) == {"open", "ready", "leased", "acked", "discarded"}


def _known_part(now: object, before: object) -> object:
    """What is there now without fields that were unknown then."""
    if isinstance(now, dict) and isinstance(before, dict):
        return {name: _known_part(now.get(name), value) for name, value in before.items()}
    if isinstance(now, list) and isinstance(before, list) and len(now) == len(before):
        return [_known_part(*pair) for pair in zip(now, before, strict=True)]
    return now


def test_a_leased_batch_is_still_its_readers(server: ServerProcess) -> None:
    run = run_of(server.start(), "books")
    assert rows(run, **LEASED) == KNOWN["leased"]
    [batch] = run.batches(state="leased")
    run.ack(batch)
    told = {group["instance_id"]: group["state"] for group in run.groups()}
    assert {told[instance] for instance in instances(KNOWN["leased"])} == {"acked"}


def test_the_next_read_is_of_what_is_ready_byte_for_byte(server: ServerProcess) -> None:
    server.start()
    for name, ready in KNOWN["ready"].items():
        assert ready_rows(run_of(server, name)) == ready, name
    assert "tokens" in json.loads(KNOWN["ready"]["books"][3])
    assert [json.loads(row)["reward"] for row in KNOWN["ready"]["hooked"]] == [2.5, 5.0]


def test_an_open_group_takes_the_rest_of_its_samples(server: ServerProcess) -> None:
    run = run_of(server.start(), "books")
    known, new = (make_sample(uid=f"open/{n}", instance_id="open", reward=0.5) for n in (1, 2))
    assert [verdict["duplicate"] for verdict in run.write(known, new)] == [True, False]
    assert "open" in instances(ready_rows(run))


def test_a_rewind_brings_back_what_came_after_the_checkpoint(server: ServerProcess) -> None:
    run = run_of(server.start(), "books")
    gone = run.client.post(f"{run.path}/rewind", json={"step": None})
    assert "step 1" in assert_error(gone, 409, "bodies_gone")["hint"]
    run.rewind(2)
    assert ready_rows(run) == KNOWN["rewound"]
    assert run.view()["weight_version"] == 2


@pytest.mark.parametrize("name", STREAMS)
def test_slimes_trainer_goes_on_by_its_list(server: ServerProcess, name: str) -> None:
    """Its run does not tell what the input file held: path and size are what they were."""
    server.start()
    listed, wanted = KNOWN["listed"][name], Counter(dict.fromkeys(INSTANCES, EPOCHS))
    with ScriptedEngine(NumberingEngine()).in_thread() as engine:
        url, saved = f"{server.url}/s/{name}", Checkpoint(1, {"0": listed})
        trainer = SlimeTrainer(url, payload(name, engine.url), groups_per_step=1, resumed_from=saved).start()
        while len(trainer.delivered) < wanted.total() - len(listed):
            trainer.step()
        num_calls = len(engine.calls)
    assert trainer.run_id == KNOWN["runs"][name]
    assert Counter(listed) + Counter(trainer.delivered) == wanted
    num_full = sum(group["num_samples"] == GROUP_SIZE for group in KNOWN["looks"][name]["all_groups"])
    assert num_calls <= GROUP_SIZE * (wanted.total() - num_full), "what was held is not generated again"


def test_a_list_with_an_input_file_of_another_size_leads_to_no_run(server: ServerProcess) -> None:
    with (server.directory / INPUT_NAME).open("a") as file:
        file.write(json.dumps({"instance_id": "e", "prompt": "e"}) + "\n")
    server.start()
    with ScriptedEngine(NumberingEngine()).in_thread() as engine:
        for name in STREAMS:
            saved = Checkpoint(1, {"0": KNOWN["listed"][name]})
            trainer = SlimeTrainer(f"{server.url}/s/{name}", payload(name, engine.url), resumed_from=saved).start()
            assert trainer.run_id not in KNOWN["runs"].values()
