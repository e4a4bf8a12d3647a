"""The real verifiers and Harbor, in the environment that install.sh made."""

import pytest

from tests.kit import interpreter


@pytest.fixture(scope="session")
def environment_python() -> str:
    """The interpreter of the environment that install.sh made."""
    return interpreter("FOREBAY_ENVIRONMENT_PYTHON", "verifiers and Harbor", "make test-environments")
