"""The command line, called in this process."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from forebay.server.cli.command_line import run


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it wrote."""

    code: int
    out: str
    err: str


Forebay = Callable[..., Outcome]


@pytest.fixture
def forebay(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Forebay:
    """Runs ``forebay ARGUMENTS`` and tells how it ended."""
    for name in ("FOREBAY_URL", "FOREBAY_TOKEN"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run([str(argument) for argument in arguments])
        written = capsys.readouterr()
        assert "Traceback" not in written.err
        return Outcome(int(ended.value.code or 0), written.out, written.err)

    return call
