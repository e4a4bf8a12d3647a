"""`status` and `start --follow` tell of groups that are lost."""

import threading

from tests.cli.conftest import Forebay
from tests.conftest import MakeServer
from tests.kit import NativeRun, make_group, poll_until


def test_status_and_follow_tell_of_them(forebay: Forebay, make_server: MakeServer) -> None:
    server = make_server()

    def write_and_stop() -> None:
        run_id = poll_until(lambda: [view["run_id"] for view in server.client.get("/v1/runs").json()["runs"]])[0]
        run = NativeRun(server, run_id)
        groups = [make_group(number, [-1.0, -2.0] if number < 30 else [0.0, 1.0]) for number in range(35)]
        run.write(*[sample for group in groups for sample in group])
        run.stop()

    writer = threading.Thread(target=write_and_stop)
    writer.start()
    said = ["--task-type", "idle", "--group-size", 2, "--set", "reward_range=[0,1]", "--follow"]
    outcome = forebay("start", *said, "--url", server.url)
    writer.join()
    words = " ".join(outcome.err.split())
    assert "30 of 35 finished groups were lost" in words
    assert "reward_range is [0, 1]" in words
    run_id = outcome.out.strip()
    for arguments in (["status"], ["status", run_id]):
        shown = " ".join(forebay(*arguments, "--url", server.url).out.split())
        assert "30 of 35 finished groups were lost" in shown, arguments
