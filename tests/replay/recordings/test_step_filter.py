"""Which groups a step means."""

import pytest

from forebay.core.errors import InvalidInput
from forebay.core.records.rows import BatchRow
from forebay.replay.errors import NotRecorded
from forebay.replay.options import parse_steps
from forebay.replay.step_filter import chosen_batches, chosen_groups, ranges_text
from tests.replay.recordings.recording_kit import batch_record, group_record

GROUPS = [group_record(number) for number in range(1, 9)]


def numbers(*steps: tuple[int, int], batches: list[BatchRow]) -> list[int]:
    return [group.number for group in chosen_groups(GROUPS, batches, steps)]


def test_without_steps_all_groups_are_meant() -> None:
    assert chosen_groups(GROUPS, [], None) == GROUPS


def test_groups_come_in_the_order_in_which_they_went_out() -> None:
    batches = [batch_record(1, [3, 1], step=50), batch_record(2, [2], step=51), batch_record(3, [5, 4], step=60)]
    assert numbers((50, 51), batches=batches) == [3, 1, 2]
    assert numbers((60, 60), (50, 50), batches=batches) == [3, 1, 5, 4]
    assert numbers((50, 60), batches=batches) == [3, 1, 2, 5, 4]  # steps between may be missing, ends may not


def test_checkpoints_stand_for_steps_where_no_batch_names_one_and_numbers_where_there_are_none() -> None:
    checkpointed = [batch_record(1, [1], checkpoint_step=10), batch_record(2, [2], checkpoint_step=10)]
    assert numbers((10, 10), batches=[*checkpointed, batch_record(3, [3])]) == [1, 2]
    assert numbers((2, 3), batches=[batch_record(n, [n]) for n in (1, 2, 3)]) == [2, 3]


@pytest.mark.parametrize("state", ["revoked", "expired", "released"])
def test_batches_that_did_not_last_stand_for_a_step_only_if_no_other_does(state: str) -> None:
    undone = batch_record(1, [1, 2], step=5, state=state)
    again = batch_record(2, [2, 3], step=5, state="leased")
    other = batch_record(3, [4], step=6, state=state)
    assert numbers((5, 6), batches=[undone, again, other]) == [2, 3, 4]


def test_a_group_that_went_out_twice_is_meant_once() -> None:
    batches = [batch_record(1, [1, 2], step=5), batch_record(2, [2, 3], step=6)]
    assert numbers((5, 6), batches=batches) == [1, 2, 3]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([(7, 7)], "step 7 is not recorded: recorded steps: 1-3,5"),
        ([(0, 2), (5, 9)], "steps 0,9 are not recorded: recorded steps: 1-3,5"),
    ],
)
def test_a_step_that_is_not_there_is_told_with_those_that_are(steps: list[tuple[int, int]], message: str) -> None:
    batches = [batch_record(number, [number], step=step) for number, step in enumerate((1, 2, 3, 5), 1)]
    with pytest.raises(NotRecorded, match=message):
        chosen_batches(batches, steps)


def test_a_run_that_nothing_went_out_of_has_no_step() -> None:
    with pytest.raises(NotRecorded, match="no batch was ever delivered"):
        chosen_batches([], [(1, 1)])


def test_ranges_are_written_as_they_are_read() -> None:
    assert ranges_text([9, 1, 3, 2, 7, 8]) == "1-3,7-9"
    assert ranges_text([4]) == "4"
    assert ranges_text([]) == ""
    assert parse_steps(ranges_text([1, 2, 3, 7])) == ((1, 3), (7, 7))
    with pytest.raises(InvalidInput, match="steps: 'x' is neither a step nor a range"):
        parse_steps("1,x")
