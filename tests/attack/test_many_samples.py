"""One write has a bounded number of samples, in every form that a body may have."""

import json

import pytest

from forebay.client import SampleWriter
from forebay.client.sample_writer.outbox import WriteLimits
from forebay.core.errors import InvalidInput
from tests.kit import ServerProcess, assert_error, make_sample

LIMIT = 10_000


@pytest.mark.parametrize("kind", ["application/json", "application/x-ndjson"])
def test_of_too_many_samples_none_is_taken_and_as_many_as_allowed_are(server: ServerProcess, kind: str) -> None:
    run = server.start_run(group_size=1)
    for num_samples in (LIMIT + 1, LIMIT):
        samples = [json.dumps(make_sample(uid=f"u{n}", instance_id=f"i{n}")) for n in range(num_samples)]
        body = "\n".join(samples) if "nd" in kind else f"[{','.join(samples)}]"
        reply = run.client.post(f"{run.path}/samples", content=body, headers={"content-type": kind})
        if num_samples > LIMIT:
            error = assert_error(reply, 422, "invalid_input", "body")
            assert "10001 samples in one write: none was stored" in error["message"]
            assert "max_batch_samples" in error["hint"]
            assert run.groups() == []
        else:
            assert {each["status"] for each in reply.json()["results"]} == {200}
    run.stop()


def test_our_own_writer_sends_more_than_that_in_several_requests(server: ServerProcess) -> None:
    run = server.start_run(group_size=1)
    limits = WriteLimits(max_samples=LIMIT, max_waiting=3 * LIMIT, max_age_s=5.0)
    with SampleWriter(server.url, run_id=run.run_id, limits=limits) as writer:
        for n in range(LIMIT + 500):
            writer.write(make_sample(uid=f"u{n}", instance_id=f"i{n}"))
    counts = run.view()["groups"]
    assert sum(counts.values()) == LIMIT + 500, counts
    with pytest.raises(InvalidInput, match="at most 10000"):
        WriteLimits(max_samples=LIMIT + 1)
    run.stop()
