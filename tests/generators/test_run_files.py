"""The copy of a generator that a run keeps, and its log."""

import resource
from pathlib import Path

from forebay.generators.discovery.module_loading import PACKAGED_FOLDER
from forebay.generators.process import code_copy
from forebay.generators.process.code_copy import copy_code
from forebay.generators.process.run_logs import log_path, read_tail
from forebay.telemetry.output_file import OutputFile, older_file


def names_in(folder: Path) -> list[str]:
    """What was copied there, beside the folders that Python's own files go to."""
    return sorted(entry.name for entry in folder.iterdir() if entry.name != "__pycache__")


def make_generator(folder: Path, name: str = "my_generator.py") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text("VERSION = 1\n")
    return path


def test_siblings_are_copied_and_large_data_is_linked(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(code_copy, "COPY_LIMIT_BYTES", 100)
    module = make_generator(tmp_path / "tasks")
    (module.parent / "helper.py").write_text("#" * 200)
    (module.parent / "small.json").write_text("{}")
    (module.parent / "large.jsonl").write_text("x" * 101)
    (module.parent / "library").mkdir()
    (module.parent / "library" / "part.py").touch()
    (module.parent / "weights").mkdir()
    (module.parent / "weights" / "all.bin").write_text("x" * 101)
    (module.parent / ".secret").touch()
    copy = copy_code(module, tmp_path / "run")
    copied = ["helper.py", "large.jsonl", "library", "my_generator.py", "small.json", "weights"]
    assert names_in(copy.parent) == copied
    assert sorted(entry.name for entry in copy.parent.iterdir() if entry.is_symlink()) == ["large.jsonl", "weights"]
    assert (copy.parent / "weights" / "all.bin").read_text() == "x" * 101


def test_a_run_keeps_the_code_that_it_started_with(tmp_path: Path) -> None:
    module = make_generator(tmp_path / "tasks")
    copy = copy_code(module, tmp_path / "run")
    module.write_text("VERSION = 2\n")
    assert copy_code(module, tmp_path / "run") == copy
    module.unlink()
    assert copy_code(module, tmp_path / "run").read_text() == "VERSION = 1\n"


def test_a_half_made_copy_is_made_again(tmp_path: Path) -> None:
    module = make_generator(tmp_path / "tasks")
    (tmp_path / "run" / "code.draft" / "rest").mkdir(parents=True)
    assert names_in(copy_code(module, tmp_path / "run").parent) == ["my_generator.py"]


def test_a_data_directory_beside_the_generator_is_not_copied_into_itself(tmp_path: Path) -> None:
    module = make_generator(tmp_path)
    copy = copy_code(module, tmp_path / "forebay-data" / "runs" / "run-1")
    assert names_in(copy.parent) == ["my_generator.py"]


def test_a_packaged_generator_is_copied_alone(tmp_path: Path) -> None:
    copy = copy_code(PACKAGED_FOLDER / "math_generator.py", tmp_path)
    assert names_in(copy.parent) == ["math_generator.py"]


def test_a_log_keeps_the_newest_output_within_its_limit(tmp_path: Path) -> None:
    path = log_path(tmp_path)
    log = OutputFile(path, limit_bytes=4_000)
    for number in range(2_000):
        log.write(b"line %d\n" % number)
    assert path.stat().st_size + older_file(path).stat().st_size <= 4_000
    assert read_tail(path, 280) == [f"line {number}" for number in range(1_720, 2_000)]
    assert read_tail(path, 2) == ["line 1998", "line 1999"]
    assert len(read_tail(path, 5_000)) > 200
    log.write(b"x" * 10_000)
    assert path.stat().st_size == 2_000
    log.close()


def test_what_the_disk_refuses_is_lost_without_an_error(tmp_path: Path) -> None:
    path = log_path(tmp_path)
    log = OutputFile(path, limit_bytes=4_000)
    log.write(b"kept\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(b"kept\n"), hard))
    try:
        log.write(b"lost\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write(b"kept, too\n")
    log.close()
    assert read_tail(path, 10) == ["kept", "kept, too"]


def test_a_log_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert read_tail(log_path(tmp_path), 10) == []
    assert read_tail(log_path(tmp_path), 0) == []
