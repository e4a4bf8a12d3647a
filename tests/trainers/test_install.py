"""The environment of ``make test-trainers``."""

from pathlib import Path

import pytest

from tests.trainers.conftest import RunScript

pytestmark = pytest.mark.trainers


def test_the_client_stands_beside_the_trainers(run_script: RunScript) -> None:
    origin = run_script("import_all.py")["client"]
    assert Path(origin) == Path(__file__).parents[2] / "client" / "__init__.py"
