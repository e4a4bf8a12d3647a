"""Where settings come from, and what a start payload may say."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from forebay.core.errors import InvalidInput
from forebay.core.run import RunSettings, check_name
from forebay.core.settings import Settings, load_settings


def test_flags_come_before_the_environment_before_the_file_before_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "forebay.toml"
    config.write_text('port = 1\nhost = "127.0.0.2"\nwrite_wait_s = 7\n')
    monkeypatch.setenv("FOREBAY_PORT", "2")
    monkeypatch.setenv("FOREBAY_HOST", "127.0.0.3")
    settings = load_settings(config, port=3, host=None)
    assert (settings.port, settings.host, settings.write_wait_s) == (3, "127.0.0.3", 7.0)
    assert settings.max_restarts == Settings().max_restarts


def test_paths_in_the_environment_are_separated_as_in_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_GENERATORS", "/a:/b")
    assert load_settings().generators == [Path("/a"), Path("/b")]


@pytest.mark.parametrize("text", ["port = 70000", "prot = 1", 'store = "cloud"'])
def test_wrong_file_is_refused(tmp_path: Path, text: str) -> None:
    config = tmp_path / "forebay.toml"
    config.write_text(text)
    with pytest.raises(ValidationError):
        load_settings(config)


def test_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.toml"):
        load_settings(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("host", "is_loopback"), [("127.0.0.9", True), ("::1", True), ("0.0.0.0", False), ("box", False)]
)
def test_loopback_is_told_from_the_rest(host: str, is_loopback: bool) -> None:
    assert Settings(host=host).is_loopback is is_loopback


def test_numbers_of_a_payload_may_be_strings() -> None:
    settings = RunSettings.parse(
        {"num_repeat_per_sample": "8", "group_timeout_seconds": "1.5", "min_valid_group_size_ratio": "0.5", "x": {}}
    )
    assert (settings.group_size, settings.group_timeout_seconds, settings.min_valid_group_size) == (8, 1.5, 4)


@pytest.mark.parametrize(("group_size", "ratio", "minimum"), [(1, 0.7, 1), (4, 0.7, 2), (8, 0.0, 1), (10, 1.0, 10)])
def test_sizes_are_rounded_down_and_at_least_one(group_size: int, ratio: float, minimum: int) -> None:
    given = {"min_valid_group_size_ratio": ratio, "min_valid_item_size_ratio": ratio}
    settings = RunSettings.parse({"group_size": group_size, **given})
    assert settings.min_valid_group_size == settings.min_valid_item_size == minimum


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_repeat_per_sample", 0),
        ("num_repeat_per_sample", "eight"),
        ("min_valid_group_size_ratio", 1.1),
        ("min_timeout_group_size_ratio", -0.1),
        ("group_timeout_seconds", 0),
        ("group_timeout_seconds", "inf"),
        ("group_deadline_seconds", "nan"),
        ("max_buffer_bytes", 0),
        ("contract", "C"),
        ("arrays", "routed_experts"),
        ("arrays", ["routed_expert"]),
        ("arrays", ["top_logprobs"]),
        ("arrays", ["top_logprobs:0"]),
        ("arrays", ["top_logprobs:129"]),
        ("arrays", ["top_logprobs:2", "top_logprobs:3"]),
    ],
)
def test_wrong_value_of_a_payload_is_named(field: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as caught:
        RunSettings.parse({"num_repeat_per_sample": 4, field: value})
    assert caught.value.field == field


def test_settings_of_a_run_survive_its_document() -> None:
    oversampling = {"rollouts_per_group": "4", "leftover": "discard"}
    given = {"group_size": 3, "contract": "B", "legacy_read_max_groups": 2, "oversampling": oversampling}
    settings = RunSettings.parse(given)
    assert RunSettings.parse(settings.model_dump(by_alias=True)) == settings


@pytest.mark.parametrize("name", ["", "a", "A-b_c.9", "x" * 64])
def test_name_of_a_run(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize("name", ["a/b", "ä", "x" * 65, "a b", "a\n"])
def test_name_that_no_path_can_carry_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput):
        check_name(name)
