"""A file in the folder of segments that the server did not make is left alone, whatever it is called."""

import pytest

from tests.conftest import MakeServer
from tests.kit import make_group

NAMES = ("99999999999999999999.log", "1.log", "00000001.log.bak", "٠٠٠٠٠٠٠٢.log", "-0000001.log")


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_no_segment_is_left_alone(make_server: MakeServer, name: str) -> None:
    server = make_server()
    run = server.start_run(group_size=2)
    run.write(*make_group("task", [1.0, 0.0]))
    server.stop()
    unknown = server.data_dir / "segments" / name
    unknown.write_text("notes")

    server.restart()
    run.write(*make_group("other", [1.0, 0.0]))
    server.kill9()
    server.restart()
    assert len(run.take(num_groups=2)["data"]) == 4
    assert unknown.read_text() == "notes"
