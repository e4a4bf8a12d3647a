"""A trainer that extends its lease all the time takes nothing of the disk, nor of what is kept for a full one."""

from tests.conftest import MakeServer
from tests.kit import NativeRun, make_group

NUM_EXTENSIONS = 1_000


def journal_bytes(run: NativeRun) -> int:
    found: int = run.client.get("/v1/runs").json()["storage"]["num_bytes"]
    return found


def test_extensions_do_not_grow_the_journal_and_outlive_a_kill(make_server: MakeServer) -> None:
    server = make_server()
    run = server.start_run(group_size=2, group_timeout_seconds=3600)
    run.wait_for_state("running")
    run.write(*make_group("task", [1.0, 0.0]), *make_group("other", [1.0, 0.0]))
    batch, other = run.read(num_groups=1), run.read(num_groups=1, lease_s=60)
    run.extend(batch, lease_s=1_000)
    before = journal_bytes(run)
    for _ in range(NUM_EXTENSIONS):
        assert run.extend(batch)["lease_s"] == 1_000
    assert journal_bytes(run) == before
    run.extend(other, lease_s=2_000)
    server.kill9()

    server.restart()
    leases = {row["batch_id"]: (row["state"], row["lease_s"]) for row in run.batches()}
    assert leases == {batch["batch_id"]: ("leased", 1_000), other["batch_id"]: ("leased", 2_000)}
    run.ack(batch)
    run.ack(other)
