"""Requests made from `/openapi.json`, right and wrong ones, over all operations: none is answered with a 5xx."""

import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

from forebay.server.app import create_api
from tests.conftest import MakeServer
from tests.kit import Json, NativeRun, ServerProcess, make_group, write_generator
from tests.lent import lend_runs, lent_url

CASES = int(os.environ.get("ROUNDS", "1")) * 600
"""Of each operation with something to vary; operations that take one value have fewer. That makes 20 000 in all."""
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
OPERATIONS = sorted(
    ((method, path) for path, methods in create_api().openapi()["paths"].items() for method in methods),
    key=lambda operation: operation[1].endswith("/stop"),
)
"""The stop of a run last: what is asked about one that works is worth more."""
KNOWN_SHARE = 0.8
"""So many of the requests name a run, a batch or a group that exists: what is behind a 404 is not attacked."""

ENDS_AT_ONCE = """
TASK_TYPE = "brief"
def run_rollout(data):
    pass
"""


class Attacked:
    """A server, what exists there, and how many cases it was asked."""

    def __init__(self, server: ServerProcess, run: NativeRun) -> None:
        self.server = server
        self.known = {
            "run_id": [run.run_id],
            "run_key": [lent_url(server, run.run_id).rpartition("/")[2]],
            "name": ["named"],
            "group_id": [group["group_id"] for group in run.groups()],
            "batch_id": [batch["batch_id"] for batch in run.batches()],
            "digest": ["0" * 32],
        }
        self.num_cases = 0
        self._rng = random.Random(0)
        self._session = requests.Session()

    def ask(self, case: Any) -> requests.Response:
        """Send a case, mostly about what exists."""
        for name in case.path_parameters or ():
            if self._rng.random() < KNOWN_SHARE:
                case.path_parameters[name] = self._rng.choice(self.known[name])
        self.num_cases += 1
        return case.call(base_url=self.server.url, session=self._session)


@pytest.fixture(scope="module")
def attacked(module_servers: MakeServer) -> Iterator[Attacked]:
    """A server that makes nobody wait, with groups and batches in every state; it is healthy before and after."""
    server = module_servers(max_wait_s=0.02, write_wait_s=0, refuse_hold_s=0, start_wait_s=1)
    write_generator(server.generators, ENDS_AT_ONCE, "brief_generator.py")
    lend_runs(server)
    rows = server.directory / "rows.jsonl"
    rows.write_text('{"prompt": "2+2?"}\n')
    run = server.start_run("lent", group_size=2, input_file=str(rows))
    for number in range(40):
        run.write(*make_group(f"task-{number}", [0.0, 1.0]))
    run.checkpoint(1, run.take(num_groups=2))
    run.read(num_groups=2)
    server.start_slime("named", group_size=2)
    server.start_slime(group_size=2)
    attacked = Attacked(server, run)
    yield attacked
    print(f"{attacked.num_cases} cases")
    assert server.client.get("/readyz").status_code == 200
    assert "Traceback" not in server.log(1 << 24)


@pytest.fixture(scope="module")
def schema(attacked: Attacked) -> Any:
    """The server's own document."""
    document = attacked.server.client.get("/openapi.json").json()
    task_types = {"anyOf": [{"enum": ["brief", "idle"]}, {"type": "string"}]}
    document["components"]["schemas"]["StartBody"]["properties"]["task_type"] = task_types
    return schemathesis.openapi.from_dict(document)


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda part: part)
def test_no_request_that_the_document_allows_or_forbids_is_a_server_error(
    attacked: Attacked, schema: Any, method: str, path: str
) -> None:
    statuses: Counter[int] = Counter()
    bad: list[Json] = []

    def ask(case: Any) -> None:
        reply = attacked.ask(case)
        statuses[reply.status_code] += 1
        if reply.status_code >= 500:
            asked = case.as_curl_command()[:2_000]
            bad.append({"status": reply.status_code, "reply": reply.text[:500], "request": asked})

    for mode in MODES:
        try_all = given(case=schema[path][method].as_strategy(generation_mode=mode))(ask)
        no_limits = settings(
            max_examples=CASES // len(MODES),
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        try:
            no_limits(seed(0)(try_all))()
        except Unsatisfiable:  # an operation without parameters cannot be asked wrongly
            assert mode is GenerationMode.NEGATIVE
    assert not bad, bad[0]
    assert statuses
