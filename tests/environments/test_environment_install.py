"""The environment of ``make test-environments``."""

import subprocess

import pytest

pytestmark = pytest.mark.environments


def test_both_libraries_stand_beside_each_other(environment_python: str) -> None:
    source = "from importlib.metadata import version; print(version('verifiers'), version('harbor'))"
    printed = subprocess.run([environment_python, "-c", source], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["0.4.0", "0.25.0"]
