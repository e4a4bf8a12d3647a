"""A wheel built from the tree works where the tree is not."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "tests")


def call(*arguments: object, cwd: Path) -> str:
    ended = subprocess.run(
        [str(argument) for argument in arguments], check=False, cwd=cwd, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "tree", ignore=LEFT_OUT)
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, folder / "tree", cwd=folder)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with the wheel; what the wheel depends on is lent by this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    install = ["-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    call(sys.executable, *install, cwd=folder)
    # By this name it is read last, and no .pth file in there is followed: the tree itself stays out of reach.
    (Path(site) / "zz_lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_wheel_holds_every_package_typed_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {"/".join(name.split("/")[:2]) for name in names if name.endswith("/__init__.py")}
    assert {name for name in names if name.endswith("py.typed")} == {f"{package}/py.typed" for package in packages}
    assert "forebay/generators/math_generator.py" in names
    assert "forebay/engines/tiny/model.py" in names
    assert {"forebay/telemetry/render/assets/page.css", "forebay/telemetry/render/assets/page.js"} <= set(names)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"forebay"}


def test_the_installed_command_works_without_the_tree(python: Path, tmp_path: Path) -> None:
    told = call(python, "-P", "-c", "import forebay.core.run as m; print(m.__file__)", cwd=tmp_path)
    assert str(python.parents[1]) in told
    assert "demo" in call(python.parent / "forebay", "--help", cwd=tmp_path)


def test_the_installed_server_finds_its_math_generator(python: Path, tmp_path: Path) -> None:
    told = call(python.parent / "forebay", "generators", "list", cwd=tmp_path)
    assert str(python.parents[1]) in told
    assert "math" in told
