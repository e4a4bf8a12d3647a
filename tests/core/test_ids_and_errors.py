"""Identifiers of fixed length, and errors that survive a process boundary."""

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core import errors, ids

INSTANCES = st.integers() | st.text(max_size=20)
ARGUMENTS: dict[type[errors.ForebayError], tuple[Any, ...]] = {
    errors.RunNotFound: ("run-1",),
    errors.GroupNotFound: ("run-1", "g"),
    errors.BatchNotFound: ("run-1", "batch-1"),
    errors.CheckpointNotFound: ("run-1", 3, [1, 2]),
    errors.BatchAcked: ("batch-1",),
    errors.LeaseLost: ("batch-1", "a rewind took it"),
    errors.BodiesGone: (["g"],),
    errors.EnginesPaused: ("run-1", "abort"),
    errors.PauseExpired: (600.0,),
    errors.WeightUpdateFailed: ("loading weights", "http://127.0.0.1:30000", "no such folder"),
    errors.UnknownTaskType: ("maths", ["math"], ["broken.py: SyntaxError"]),
    errors.RunEnded: ("run-1", "finished"),
    errors.NoRun: ("",),
    errors.BodyTooLarge: (5,),
    errors.BufferFull: ("5 samples",),
    errors.StorageFailed: ("No space left on device",),
    errors.HookFailed: ("filter_item", "it raised", "Traceback"),
    errors.MissingExtra: ("ray", "ray"),
}


def every_error(kind: type[errors.ForebayError] = errors.ForebayError) -> list[type[errors.ForebayError]]:
    """Those of the core; a test before this one may have loaded others."""
    below = (found for sub in kind.__subclasses__() for found in every_error(sub))
    return [found for found in (kind, *below) if found.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_error_survives_pickling(kind: type[errors.ForebayError]) -> None:
    error = kind(*ARGUMENTS.get(kind, ("what went wrong",)))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error) == error.message
    assert again.__dict__ == error.__dict__


def test_codes_are_unique_and_statuses_are_errors() -> None:
    kinds = every_error()
    assert len({kind.code for kind in kinds}) == len(kinds)
    assert all(400 <= kind.status < 600 for kind in kinds)


def test_error_is_also_what_the_standard_library_calls_it() -> None:
    assert issubclass(errors.InvalidInput, ValueError)
    assert issubclass(errors.StorageFailed, OSError)
    assert issubclass(errors.EngineUnavailable, ConnectionError)


@given(INSTANCES, st.integers(0, 1 << 40), INSTANCES, st.integers(0, 1 << 40))
def test_group_ids_tell_instances_and_epochs_apart(
    one: str | int, epoch: int, other: str | int, other_epoch: int
) -> None:
    is_same = (type(one), one, epoch) == (type(other), other, other_epoch)
    assert (ids.group_id(one, epoch) == ids.group_id(other, other_epoch)) == is_same
    assert len(ids.group_id(one, epoch)) == 16


def test_number_and_text_name_different_groups() -> None:
    assert ids.group_id(1, 0) != ids.group_id("1", 0)


@given(st.integers(0, 65_535), st.integers(0, 255), st.integers(0, 4_095))
def test_request_ids_have_one_length_and_the_prefix_of_their_group(slot: int, attempt: int, call: int) -> None:
    run_id, group = ids.new_run_id(), ids.group_id("task", 3)
    found = ids.request_id(run_id, group, slot, attempt, call)
    assert len(found) == len(ids.request_id(run_id, group, 0, 0))
    assert found.startswith(ids.group_rid_prefix(run_id, group))
    assert found.startswith(ids.run_rid_prefix(run_id))
    assert not found.startswith(ids.run_rid_prefix(ids.new_run_id()))
