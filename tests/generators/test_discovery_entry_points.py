"""Generators that come with an installed package."""

from pathlib import Path

import pytest

from forebay.core.errors import GeneratorBroken
from forebay.generators.discovery import files
from forebay.generators.discovery.catalog import Catalog

GOOD = "TASK_TYPE = {task_type!r}\n\ndef run_rollout(data):\n    pass\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path that holds one installed distribution with two entry points."""
    site = tmp_path / "lib" / "site-packages"
    info = site / "shipped-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shipped\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[forebay.generators]\nshipped = shipped.tasks.one\ngone = shipped.tasks.gone\n"
    )
    package = site / "shipped" / "tasks"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("raise RuntimeError('the server imported a package')\n")
    (package / "one.py").write_text(GOOD.format(task_type="shipped"))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(files, "PACKAGED_FOLDER", tmp_path)
    return site


def catalog(root: Path) -> Catalog:
    return Catalog([], working_dir=root)


async def test_an_entry_point_is_found_without_importing_its_package(site: Path, tmp_path: Path) -> None:
    async with catalog(tmp_path) as found:
        info = await found.resolve("shipped", wait_s=None)
    assert (info.source, info.path) == ("entry-point", site / "shipped/tasks/one.py")


async def test_an_entry_point_without_a_module_is_told(site: Path, tmp_path: Path) -> None:
    async with catalog(tmp_path) as found:
        failed = [info for info in await found.scan() if info.status == "failed"]
    assert [info.error for info in failed] == [
        "entry point 'gone': module 'shipped.tasks.gone' not found; reinstall its package"
    ]


async def test_a_users_file_replaces_an_installed_one(site: Path, tmp_path: Path) -> None:
    (tmp_path / "generators").mkdir()
    mine = tmp_path / "generators" / "mine_generator.py"
    mine.write_text(GOOD.format(task_type="shipped"))
    async with catalog(tmp_path) as found:
        info = await found.resolve("shipped", wait_s=None)
        assert (info.path, info.replaces) == (mine, site / "shipped/tasks/one.py")
        mine.write_text("TASK_TYPE = 'shipped'\nimport no_such_thing\n")
        with pytest.raises(GeneratorBroken, match=r"mine_generator\.py"):
            await found.resolve("shipped", wait_s=None)
