"""``serve`` and ``engine``: what they refuse, and that a refusal is a line, not a traceback."""

from pathlib import Path

import pytest

from tests.cli.conftest import Forebay
from tests.kit import ServerProcess


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--host", "0.0.0.0", "--port", "0"], "FOREBAY_TOKEN"),
        (["--port", "99999"], "setting port"),
        (["--config", "nowhere.toml"], "nowhere.toml"),
        (["--port", "many"], "--port"),
    ],
)
def test_wrong_settings_are_told(forebay: Forebay, arguments: list[str], told: str) -> None:
    outcome = forebay("serve", *arguments)
    assert outcome.code == 2
    assert told in outcome.err


def test_a_variable_that_is_wrong_is_named(forebay: Forebay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_MAX_RESTARTS", "-1")
    outcome = forebay("serve")
    assert outcome.code == 2
    assert "setting max_restarts" in outcome.err


def test_a_port_that_is_taken_is_told(forebay: Forebay, server: ServerProcess, tmp_path: Path) -> None:
    outcome = forebay("serve", "--port", server.port, "--data-dir", tmp_path)
    assert outcome.code == 2
    assert "another server may be running" in outcome.err


def test_an_engine_without_a_model_folder_is_told(forebay: Forebay, tmp_path: Path) -> None:
    outcome = forebay("engine", "tiny", "--port", 0, "--model-path", tmp_path)
    assert outcome.code == 2
    assert "config.json" in outcome.err


def test_the_version_and_the_commands_are_shown(forebay: Forebay) -> None:
    assert forebay("--version").out.startswith("forebay 0.")
    told = forebay("--help").out
    assert all(name in told for name in ("serve", "start", "status", "stop", "generators", "engine", "demo"))
