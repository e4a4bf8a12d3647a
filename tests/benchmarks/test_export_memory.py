"""Two gigabytes of samples are exported in each format, and searched, in less than 500 MB of memory."""

import os
from pathlib import Path

import msgspec
import pytest

from forebay.core.binary_sample import pack
from forebay.replay import Recording
from tests.benchmarks.test_recording_memory import peak_of
from tests.replay.exporters.export_kit import stored
from tests.replay.recordings.recording_kit import RecordingWriter, group_record, run_record

pytestmark = pytest.mark.bench

GROUPS, GROUP_SIZE = 250, 8
NUM_TOKENS, TEXT_BYTES = 40_000, 700_000
MOST_BYTES = 500_000_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.fbr"
    arrays = os.urandom(NUM_TOKENS), bytes(4 * NUM_TOKENS), b"\0" * (NUM_TOKENS // 2) + b"\1" * (NUM_TOKENS // 2)
    tokens = b"".join(bytes([one, 0, 0, 0]) for one in arrays[0])
    with RecordingWriter(path, run_record()) as writer:
        for number in range(1, GROUPS + 1):
            group = group_record(number)
            for slot in range(GROUP_SIZE):
                text = os.urandom(TEXT_BYTES // 2).hex()
                messages = [{"role": "user", "content": "Write."}, {"role": "assistant", "content": text}]
                own = {"uid": f"{number}/{slot}", "instance_id": group.instance_id, "epoch": 0, "slot": slot}
                body = pack(msgspec.json.encode(own | {"reward": 1.0, "messages": messages}), tokens, *arrays[1:])
                writer.add_sample(stored(group, slot, body), body)
            writer.add_group(group)
    with Recording(path) as recording:
        assert recording.made.num_bytes > 2_000_000_000
    return path


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["jsonl", "parquet", "atif"])
def test_an_export_takes_the_memory_of_a_group(large: Path, tmp_path: Path, target: str) -> None:
    taken = peak_of("export", str(large), str(tmp_path / "out"), "--to", target)
    print(f"{target}: {taken >> 20} MiB")
    assert taken < MOST_BYTES


@pytest.mark.timeout(900)
def test_a_search_takes_the_memory_of_a_group(large: Path) -> None:
    taken = peak_of("show", str(large), "--grep", "ffff")
    print(f"search: {taken >> 20} MiB")
    assert taken < MOST_BYTES
