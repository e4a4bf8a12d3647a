"""What is said at once of a run that asks for workers on Ray."""

import importlib.machinery
from pathlib import Path

import pytest

from forebay.core.errors import InvalidInput
from forebay.core.run import RunSettings
from forebay.core.settings import Settings
from forebay.generators.discovery.info import GeneratorInfo
from forebay.server.runs import worker_checks
from forebay.server.runs.worker_checks import check_workers

GENERATOR = GeneratorInfo(Path("a_generator.py"), "user", "", "ok", imports_base=True)
ELSEWHERE = "10.255.0.1:6379"


@pytest.fixture(autouse=True)
def _ray_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_checks, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))


def check(engine: str = "http://127.0.0.1:30000", **settings: str) -> None:
    run = RunSettings.parse({"group_size": 2, "workers": 2, "backend": "ray"})
    check_workers(run, [engine], GENERATOR, Settings(**{"_env_file": None, **settings}))


@pytest.mark.parametrize(
    ("settings", "field", "words"),
    [
        ({}, "backend", "has no Ray cluster"),
        ({"ray_address": ELSEWHERE}, "public_url", "cannot reach this server at http://127.0.0.1:"),
        ({"ray_address": ELSEWHERE, "host": "0.0.0.0"}, "public_url", "http://127.0.0.1:"),
        ({"ray_address": ELSEWHERE, "public_url": "http://localhost:1"}, "public_url", "http://localhost:1"),
        ({"ray_address": ELSEWHERE, "public_url": "http://10.255.0.2:8889"}, "remote_engine_url", "engine at"),
        ({"ray_address": ELSEWHERE, "host": "10.255.0.2"}, "remote_engine_url", "engine at http://127.0.0.1:30000"),
    ],
)
def test_what_another_machine_cannot_reach_is_refused(settings, field, words) -> None:
    with pytest.raises(InvalidInput, match=words) as refused:
        check(**settings)
    assert (refused.value.field, bool(refused.value.hint)) == (field, True)


def test_ray_that_is_not_installed_is_said(monkeypatch) -> None:
    monkeypatch.setattr(worker_checks, "find_spec", lambda _: None)
    with pytest.raises(InvalidInput, match="not installed") as refused:
        check(ray_address="auto")
    assert (refused.value.field, refused.value.hint) == ("backend", "pip install 'forebay[ray]'")


@pytest.mark.parametrize("address", ["auto", "local", "127.0.0.1:6379", "localhost:6379", "[::1]:6379"])
def test_a_cluster_of_this_machine_may_have_loopback_addresses(address) -> None:
    check(ray_address=address)


def test_a_cluster_elsewhere_that_reaches_everything_is_taken() -> None:
    check("http://10.255.0.3:30000", ray_address=ELSEWHERE, public_url="http://10.255.0.2:8889")


def test_the_cluster_is_no_field_of_a_request(server, tmp_path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instance_id": "a", "prompt": "a"}\n')
    body = {"task_type": "math", "group_size": 2, "input_file": str(rows), "remote_engine_url": "http://127.0.0.1:1"}
    reply = server.client.post("/v1/runs", json={**body, "workers": 1, "backend": "ray", "ray_address": "auto"})
    assert reply.status_code == 422
    assert reply.json()["error"]["field"] == "backend"
