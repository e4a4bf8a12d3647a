"""Reading the rows of an input file."""

from pathlib import Path

import pytest

from forebay.core.errors import InputRefused
from forebay.generators.job.input_rows import RowFile, validate_rows


def test_rows_come_in_file_order_and_unnamed_ones_are_called_by_their_line(write_rows) -> None:
    path = write_rows({"prompt": "a"}, "", {"instance_id": "x", "prompt": "b"}, {"instance_id": None, "prompt": "c"})
    rows = list(RowFile(path).rows())
    assert [row.instance_id for row in rows] == [0, "x", 3]
    assert rows[0].prompt == [{"role": "user", "content": "a"}]
    assert RowFile(path).num_rows == 3


def test_ids_keep_their_json_type(write_rows) -> None:
    path = write_rows({"instance_id": 1, "prompt": "a"}, {"instance_id": "1", "prompt": "b"})
    assert [row.instance_id for row in RowFile(path).rows()] == [1, "1"]
    assert validate_rows(path) is None


def test_a_shuffle_keeps_the_numbers_and_differs_from_epoch_to_epoch(write_rows) -> None:
    path = write_rows(*({"prompt": str(number)} for number in range(50)))
    shuffled = RowFile(path, shuffle_seed=7)
    first, second = ([row.instance_id for row in shuffled.rows(epoch)] for epoch in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(50))
    assert [row.instance_id for row in RowFile(path, shuffle_seed=7).rows(0)] == first
    assert all(row.prompt[0]["content"] == str(row.instance_id) for row in shuffled.rows())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "not JSON"),
        ('{"prompt": "a", "score": NaN}', "not JSON"),
        ("[1]", "must be a JSON object (got a list)"),
        ('{"question": "a"}', 'has no "prompt"'),
        ('{"prompt": []}', "(got an empty list)"),
        ('{"prompt": 3}', "(got a number)"),
        ('{"prompt": [{"content": "a"}]}', 'must be an object with a "role"'),
        ('{"prompt": "a", "instance_id": true}', "instance_id must be a string or a number"),
        ('{"prompt": "a", "instance_id": [1]}', "instance_id must be a string or a number"),
        (
            '{"prompt": "a", "instance_id": "' + "x" * 1_025 + '"}',
            "instance_id must have at most 1024 characters (got 1025)",
        ),
        ('{"prompt": "a", "instance_id": "same"}', "'same' is also on an earlier line"),
    ],
)
def test_a_problem_names_file_and_line(write_rows, line, message) -> None:
    path = write_rows({"instance_id": "same", "prompt": "q"}, line)
    problem = validate_rows(path)
    assert problem is not None
    assert (problem.path, problem.line) == (path, 2)
    assert f"{path}, line 2: " in str(problem)
    assert message in str(problem)


def test_only_the_first_rows_are_looked_at_when_asked(write_rows) -> None:
    path = write_rows({"prompt": "a"}, {"prompt": "b"}, "broken")
    assert validate_rows(path, first=2) is None
    problem = validate_rows(path, first=3)
    assert problem is not None
    assert problem.line == 3


def test_a_file_that_cannot_be_read_or_is_empty_is_a_problem(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in str(validate_rows(tmp_path / "none"))
    assert "Is a directory" in str(validate_rows(tmp_path))
    (tmp_path / "empty").write_text("\n")
    assert "holds no rows" in str(validate_rows(tmp_path / "empty"))


def test_reading_raises_what_validating_tells(write_rows) -> None:
    path = write_rows({"prompt": "a"}, "broken")
    with pytest.raises(InputRefused, match="line 2") as refused:
        list(RowFile(path).rows())
    assert refused.value.field == "input_file"
