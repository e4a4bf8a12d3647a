"""A dump of a skipped step that somebody else has made: it takes no more memory than its files give cause for."""

import json
from pathlib import Path

import pytest

from forebay.replay.skip import SkipManager
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
TREES = {
    "one of many items": [{"$objects": [1], "shape": [1 << 40]}],
    "array that is not there": [{"$array": "a", "as": "numpy"}],
}


def replace(step: Path, tree: bytes) -> None:
    (step / "gen_batch.json").write_bytes(tree)
    meta = json.loads((step / "meta.json").read_text())
    (step / "meta.json").write_text(json.dumps({**meta, "num_bytes": {"gen_batch.json": len(tree)}}))


@pytest.mark.parametrize("kind", TREES)
def test_a_dump_of_a_few_kilobytes_does_not_fill_the_memory(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    SkipManager.init(config(tmp_path))
    rollouts = Rollouts()
    rollouts.at(1)
    replace(folder(tmp_path) / "1", json.dumps(TREES[kind]).encode())
    said, num_mib = run_python(LOAD, folder(tmp_path)).splitlines()
    assert said.startswith("unusable:")
    assert int(num_mib) < 300
    SkipManager.init(config(tmp_path))
    assert rollouts.at(1)["call"] == 2
    assert "is not used: it cannot be decoded" in warnings_of(caplog)[0]
