"""A file in the folder of segments that the server did not make is left alone, whatever it is called."""

import pytest

from tests.conftest import MakeServer
from tests.kit import make_group

NAMES = ("99999999999999999999.log", "999999999.log", "1.log", "00000001.log.bak", "٠٠٠٠٠٠٠٢.log", "-0000001.log")


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


def test_a_file_with_the_last_number_costs_no_acknowledged_sample(make_server: MakeServer) -> None:
    server = make_server(segment_bytes=1 << 16)
    run = server.start_run(group_size=2)
    server.stop()
    (server.data_dir / "segments" / "999999998.log").write_text("notes")

    server.restart()
    acknowledged = 0
    for number in range(60):
        reply = run.client.post(f"{run.path}/samples", json=make_group(f"task-{number}", [1.0, 0.0], text="x" * 3_000))
        acknowledged += sum(each["status"] == 200 for each in reply.json().get("results", ()))
    assert 0 < acknowledged < 120
    assert "no segment can be called 999999999.log" in server.log()
    server.kill9()
    server.restart()
    assert sum(group["num_samples"] for group in run.groups()) == acknowledged
