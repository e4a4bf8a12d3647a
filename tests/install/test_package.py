"""A wheel built from the tree works where the tree is not."""

import zipfile
from pathlib import Path

from tests.install.conftest import ROOT, Environment, call


def test_the_wheel_holds_every_package_typed_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packages = {"/".join(name.split("/")[:2]) for name in names if name.endswith("/__init__.py")}
    assert {name for name in names if name.endswith("py.typed")} == {f"{package}/py.typed" for package in packages}
    assert "forebay/generators/math_generator.py" in names
    assert "forebay/engines/tiny/model.py" in names
    assert {"forebay/telemetry/render/assets/page.css", "forebay/telemetry/render/assets/page.js"} <= set(names)
    page = {f"forebay/server/ui/assets/{file.name}" for file in (ROOT / "server" / "ui" / "assets").iterdir()}
    assert page <= set(names)
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"forebay"}


def test_the_installed_server_finds_its_math_generator(environment: Environment, tmp_path: Path) -> None:
    python = environment("server")
    told = call(python.parent / "forebay", "generators", "list", cwd=tmp_path)
    assert str(python.parents[1]) in told
    assert "math" in told


def test_the_demo_runs_from_the_wheel(environment: Environment, tmp_path: Path) -> None:
    forebay = environment("local").parent / "forebay"
    told = call(forebay, "demo", "--num-instances", 2, "--data-dir", "demo", cwd=tmp_path)
    assert "groups 2 of 2 done" in told
