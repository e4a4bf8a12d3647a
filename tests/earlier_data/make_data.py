"""``python -m tests.earlier_data.make_data``: writes ``earlier.zip`` with the server of today.

The one that is there was made by an earlier server, and is of use for that alone: it is not to be made anew.
"""

import json
import shutil
import threading
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import httpx

from forebay.client.sample_writer.encode import SAMPLES_TYPE, encode_sample, join_samples
from forebay.engines.scripted import ScriptedEngine
from tests.earlier_data.earlier_kit import (
    ARCHIVE,
    LEASED,
    NO_ENGINE_PORT,
    STREAMS,
    NumberingEngine,
    look,
    make_folder,
    payload,
    ready_rows,
    rows,
)
from tests.kit import Json, NativeRun, ServerProcess, make_group, make_sample, poll_until
from tests.slime.trainer import SlimeTrainer

FOLDER = Path("/tmp/earlier")
TEXT = 'print("größer")\t# 更多 \\n' * 250
OLD, GROUPS_PER_STEP = (1, 2, 3), 4
NUM_CALLS = 11
"""Of sixteen rollouts: in the last, the server dies."""


def books(server: ServerProcess) -> NativeRun:
    """A run with groups in all states, written by hand; the bodies of its first step are removed."""
    run = server.start_run(
        group_size=3, keep_checkpoints=2, min_valid_group_size_ratio=0.5, min_valid_item_size_ratio=0.5
    )
    for step in OLD:
        run.client.put(f"{run.path}/weight_version", json={"weight_version": step}).raise_for_status()
        for n in range(GROUPS_PER_STEP):
            run.write(*make_group(f"step {step}, {n}", [0.0, 1.0, 0.5], extra_info={"text": TEXT}, weight_version=step))
        run.checkpoint(step, run.read(num_groups=GROUPS_PER_STEP, step=step))
    poll_until(lambda: run.client.post("/v1/gc").json()["num_segments_freed"] or not first_segment(server).exists())
    run.write(*make_group("all the same", [0.5, 0.5, 0.5]))
    run.write(*(make_sample(uid=f"failed/{n}", instance_id="failed", reward=..., **failure()) for n in range(3)))
    run.write(*make_group("acked", [1.0, 0.0, 0.25]), *make_group("given back", [0.25, 0.5, 1.0]))
    run.take(num_groups=1)
    run.release(run.read(num_groups=1))
    run.write(*make_group("leased", [0.25, 0.5, 0.75]))
    run.read(**LEASED)
    run.write(*make_group("ready", [0.125, 1.0, 0.0], messages=[{"role": "assistant", "content": TEXT[:300]}]))
    binary = [encode_sample(sample | tokens(n)) for n, sample in enumerate(make_group("binary", [0.0, 1.0, 0.5]))]
    headers = {"Content-Type": SAMPLES_TYPE}
    run.client.post(f"{run.path}/samples", content=join_samples(binary), headers=headers).raise_for_status()
    run.write(*make_group("one failed", [0.0, 1.0]))
    run.write(make_sample(uid="one failed/2", instance_id="one failed", reward=..., **failure()))
    fork: Json = {"instance_id": 7, "epoch": 0, "slot": 0, "rollout_id": "r"}
    run.write(make_sample(uid="7/fork", fork=1, **fork), make_sample(uid="7/0", **fork))
    run.write(*(make_sample(uid=f"7/{n}", instance_id=7, epoch=0, slot=n, reward=0.5 * n - 0.5) for n in (1, 2)))
    run.write(make_sample(uid="acked/3", instance_id="acked", epoch=0, slot=1))
    judge(run)
    run.write(*make_group("full", [0.0, 1.0, 0.5]), *make_group("open", [0.0, 1.0]))
    return run


def judge(run: NativeRun) -> None:
    """Full groups become ready, or not, when somebody asks for more than there are."""
    assert run.read(num_groups=100)["data"] == []


def first_segment(server: ServerProcess) -> Path:
    """The log that holds the bodies of the first step."""
    return server.data_dir / "segments" / "00000001.log"


def failure() -> Json:
    """What makes a sample a failed one."""
    return {"status": "failed", "error": {"type": "AgentFailed", "message": 'no "answer" in 3 turns'}}


def tokens(number: int) -> Json:
    """Arrays of a sample."""
    return {"tokens": [*range(90, 99), number], "logprobs": [-0.5 * n for n in range(10)], "loss_mask": [0, 1] * 5}


def make(server: ServerProcess, engine: NumberingEngine, engine_url: str) -> Json:
    """Fill a data directory, with a stop in between, and kill its server; the runs, and what slime's trainers know."""
    server.start()
    kept, hooked, ended = books(server), server.start_run("hooked", group_size=2), server.start_run(group_size=2)
    hooked.write(*make_group("by a hook", [0.25, 0.5]))
    ended.write(*make_group("of an ended run", [0.25, 0.5]))
    ended.stop()
    poll_until(lambda: ended.view()["has_ended"])
    assert server.stop() == 0
    server.start()
    runs, listed = {"books": kept.run_id, "hooked": hooked.run_id, "ended": ended.run_id}, {}
    for name in STREAMS:
        engine.num_left = NUM_CALLS
        trainer = SlimeTrainer(f"{server.url}/s/{name}", payload(name, engine_url)).start()
        trainer.step()
        runs[name], listed[name] = trainer.run_id, trainer.checkpoint().listed
        run = NativeRun(server, trainer.run_id)
        poll_until(partial(has_all, run))
        judge(run)
    last = server.start_run(group_size=2)
    writing = threading.Thread(target=write_on, args=(last,))
    writing.start()
    poll_until(lambda: num_samples(last) > 5)
    server.kill9()
    writing.join()
    return {"runs": {**runs, "last": last.run_id}, "listed": listed}


def num_samples(run: NativeRun) -> int:
    """Those of all groups."""
    return sum(group["num_samples"] for group in run.groups())


def has_all(run: NativeRun) -> bool:
    """Whether everything is stored that the engine has said."""
    return num_samples(run) == NUM_CALLS


def write_on(run: NativeRun) -> None:
    """Write until nobody answers any more."""
    with suppress(httpx.TransportError):
        for n in count():
            run.write(make_sample(uid=str(n), instance_id=n, messages=[{"role": "user", "content": TEXT[:1_000]}]))


def ask(server: ServerProcess, runs: dict[str, str]) -> Json:
    """What the server of the time says of the directory when it is opened again."""
    run = {name: NativeRun(server, run_id) for name, run_id in runs.items()}
    return {
        "looks": {name: look(each) for name, each in run.items()},
        "leased": rows(run["books"], **LEASED),
        "ready": {name: ready_rows(run[name]) for name in ("books", "hooked", "ended")},
        "rewound": run["books"].rewind(OLD[1]) and ready_rows(run["books"]),
    }


def main() -> None:
    """Make the archive."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    engine = NumberingEngine()
    with ScriptedEngine(engine, port=NO_ENGINE_PORT).in_thread() as at:
        made = make(make_folder(FOLDER / "made"), engine, at.url)
    data = FOLDER / "made" / "data"
    for needless in (data / "lock", *(data / "runs").rglob("*.log")):
        needless.unlink()
    packed = FOLDER / "packed"
    shutil.copytree(data, packed / "data")
    server = make_folder(FOLDER / "asked", data).start()
    (packed / "answers.json").write_text(json.dumps({**made, **ask(server, made["runs"])}, ensure_ascii=False))
    server.close()
    shutil.make_archive(str(ARCHIVE.with_suffix("")), "zip", packed)


if __name__ == "__main__":
    main()
