"""``make install`` installs the versions that the tests ran with, from wherever pip is told to take them."""

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
VERSIONS = dict(line.split("==") for line in LINES)


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def dependencies() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for told in (*project["dependencies"], *(each for extra in extras.values() for each in extra)):
        if told.startswith("forebay["):
            continue
        yield normal(re.match(r"[A-Za-z0-9._-]+", told)[0])  # type: ignore[index]


def test_a_line_is_a_name_and_a_version_and_no_address() -> None:
    assert LINES
    assert not [line for line in LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!_-]+", line)]


def test_every_dependency_has_its_version() -> None:
    assert set(dependencies()) <= set(map(normal, VERSIONS))


def test_the_environment_of_the_tests_has_these_versions() -> None:
    differing = {}
    for name, wanted in VERSIONS.items():
        try:
            found = version(name).partition("+")[0]
        except PackageNotFoundError:  # another platform, or another Python, needs fewer
            continue
        if found != wanted:
            differing[name] = (found, wanted)
    assert not differing, "make constraints writes them anew"


def test_make_install_keeps_to_them() -> None:
    lines = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pip install" in line]
    assert len(lines) > 1
    assert not [line for line in lines if "-c constraints.txt" not in line and "echo" not in line]
