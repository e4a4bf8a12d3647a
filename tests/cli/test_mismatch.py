"""``forebay mismatch``, against a real server and NumPy."""

import json

import numpy
import pytest

from forebay.client import BufferClient
from tests.cli.conftest import Forebay
from tests.kit import ServerProcess
from tests.server.test_annotations import LOGPROBS, MASK, written


def test_mismatch_prints_what_numpy_computes(forebay: Forebay, server: ServerProcess) -> None:
    run = server.start_run(group_size=2)
    target = [run.run_id, "--url", server.url]
    written(run, "a")
    nothing = forebay("mismatch", *target)
    assert (nothing.code, "has no annotations trainer_logprobs" in nothing.err) == (1, True)
    trainer = numpy.random.default_rng(1).normal(-1, 0.5, (2, 2, 10)).astype("float32")
    with BufferClient(server.url) as client:
        client.attach(run.run_id)
        assert client.read(num_groups=1) is not None
        for step in range(2):
            client.annotate("a/0", {"trainer_logprobs": trainer[step, 0]}, step=step)
            client.annotate("a/1", {"trainer_logprobs": trainer[step, 1, 4:]}, step=step)
        client.annotate("a/1", {"loss": 0.5}, step=0)
    counted = numpy.array(MASK) == 1
    d = (trainer - numpy.array(LOGPROBS))[:, :, counted]

    def expected(d: "numpy.ndarray") -> list[float]:
        return [-d.mean(), (numpy.exp(d) - 1 - d).mean(), abs(d).max(), (abs(d) > 0.1).mean()]

    def rows(*flags: str) -> "list[dict]":
        return json.loads(forebay("mismatch", *target, "--json", *flags).out)["rows"]

    names = ("k1", "k3", "largest", "above_0.1")
    for step, row in enumerate(rows()):
        assert (row["step"], row["samples"], row["tokens"]) == (step, 2, 10)
        assert [row[name] for name in names] == pytest.approx(expected(d[step]), abs=1e-6)
    parts = {"turn": {1: [0, 1, 2], 2: [3, 4]}, "version": {1: [0, 1, 2], 2: [3, 4]}}
    parts["position"] = {1: [0], 2: [1], 4: [2], 7: [3], 9: [4]}
    for by, places in parts.items():
        found = rows("--step", "1", "--by", by)
        assert [row[by] for row in found] == list(places)
        for row, place in zip(found, places.values(), strict=True):
            assert [row[name] for name in names] == pytest.approx(expected(d[1][:, place]), abs=1e-6)
    assert forebay("mismatch", *target).out.splitlines()[0].split()[:4] == ["step", "samples", "tokens", "k1"]
