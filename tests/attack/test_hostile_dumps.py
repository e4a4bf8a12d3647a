"""A dump of a skipped step that somebody else has sealed: it takes no more memory than its files give cause for."""

import json
from pathlib import Path

import pytest

from forebay.replay.skip import SkipManager
from forebay.replay.skip.dumps import FileProof, _digest, _sealed
from tests.replay.skip.skip_kit import Rollouts, config, folder, run_python, warnings_of

LOAD = """
import resource, sys
from pathlib import Path
from forebay.replay.skip.dumps import DumpFolder, DumpUnusable
import numpy
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, -1))
try:
    print(DumpFolder(Path(sys.argv[1])).load(1))
except DumpUnusable as error:
    print("unusable:", error)
(peak,) = (line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) >> 10)
"""
ARRAYS = {
    "one of many texts": [{"$array": ["x"] * 700, "dtype": "<U999999", "shape": [700]}],
    "many of one text": [{"$array": ["x"], "dtype": "<U999999", "shape": [1]}] * 60,
    "tensor of no bytes": [{"$tensor": "a", "as": "numpy"}],
}


def seal(step: Path, tree: bytes) -> None:
    (step / "gen_batch.json").write_bytes(tree)
    body = json.loads((step / "meta.json").read_text())
    del body["blake2b"]
    proof = FileProof(_digest(tree), len(tree))
    body["files"] = {"gen_batch.json": {"blake2b": proof.blake2b, "num_bytes": proof.num_bytes}}
    (step / "meta.json").write_bytes(_sealed(json.dumps(body).encode()))


@pytest.mark.parametrize("kind", ARRAYS)
def test_a_dump_of_a_few_kilobytes_does_not_fill_the_memory(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    SkipManager.init(config(tmp_path))
    rollouts = Rollouts()
    rollouts.at(1)
    seal(folder(tmp_path) / "1", json.dumps(ARRAYS[kind]).encode())
    said, num_mib = run_python(LOAD, folder(tmp_path)).splitlines()
    assert said.startswith("unusable:")
    assert int(num_mib) < 300
    SkipManager.init(config(tmp_path))
    assert rollouts.at(1)["call"] == 2
    assert "is not used: no value can be made of it" in warnings_of(caplog)[0]
