"""What users import of telemetry, and that nobody pays for what they do not."""

import subprocess
import sys

import pytest

import forebay.telemetry


def test_users_find_what_they_need() -> None:
    assert sorted(forebay.telemetry.__all__) == ["EventLog", "span", "traceparent"]
    assert all(callable(getattr(forebay.telemetry, name)) for name in forebay.telemetry.__all__)
    with pytest.raises(AttributeError, match="no attribute 'spam'"):
        forebay.telemetry.spam  # noqa: B018 - it is asked for


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("forebay.telemetry.log", "{'msgspec', 'forebay.telemetry.tracing', 'forebay.telemetry.event_log'}"),
        ("forebay.telemetry.tracing.tracer", "{'pydantic', 'asyncio', 'opentelemetry', 'prometheus_client'}"),
        ("forebay.telemetry.event_log", "{'pydantic', 'asyncio', 'forebay.telemetry.tracing'}"),
    ],
)
def test_nothing_heavy_is_loaded(module: str, heavy: str) -> None:
    code = f"import sys, {module}; found = {heavy} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
