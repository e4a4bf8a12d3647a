"""Environments in which the wheel is installed, with nothing but what one of its extras asks for."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "tests")

CALL_S = 200.0
"""A command's limit; the demo takes ten seconds on an idle machine."""

Environment = Callable[[str], Path]


def call(*arguments: object, cwd: Path) -> str:
    """What a command prints; it has to succeed."""
    ended = subprocess.run(
        [str(argument) for argument in arguments], check=False, cwd=cwd, capture_output=True, text=True, timeout=CALL_S
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def build_wheel(folder: Path) -> Path:
    """Built from a copy, so that nothing is left in the tree."""
    shutil.copytree(ROOT, folder / "tree", ignore=LEFT_OUT)
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, folder / "tree", cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, built once."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Makes the environment of ``forebay[EXTRAS]``, once for each, and returns its Python."""
    made: dict[str, Path] = {}

    def make(extras: str) -> Path:
        if extras not in made:
            made[extras] = _install(wheel, extras, tmp_path_factory.mktemp("installed"))
        return made[extras]

    return make


def _install(wheel: Path, extras: str, folder: Path) -> Path:
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    install = ["-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    call(sys.executable, *install, cwd=folder)
    (ours,) = Distribution.discover(name="forebay", path=[str(site)])
    for name in _dependencies(ours, Requirement(f"forebay[{extras}]")):
        _lend(distribution(name), site)
    return python


def _dependencies(ours: Distribution, wanted: Requirement) -> set[str]:
    """Names of all distributions that ``wanted``, of ours, needs."""
    found: set[tuple[str, str]] = set()
    waiting = [wanted]
    while waiting:
        each = waiting.pop()
        for extra in {"", *each.extras}:
            if (each.name, extra) not in found:
                found.add((each.name, extra))
                waiting += _requirements(ours if each.name == "forebay" else distribution(each.name), extra)
    return {name for name, _ in found} - {"forebay"}


def _requirements(of: Distribution, extra: str) -> Iterator[Requirement]:
    for each in map(Requirement, of.requires or ()):
        if each.marker is None or each.marker.evaluate({"extra": extra}):
            yield each


def _lend(lender: Distribution, site: Path) -> None:
    """Link what the environment of the tests has installed: an index would take minutes."""
    here = Path(sysconfig.get_path("purelib"))
    for name in {file.parts[0] for file in lender.files or ()} - {"..", "__pycache__"}:
        if not (site / name).exists():
            (site / name).symlink_to(here / name)
