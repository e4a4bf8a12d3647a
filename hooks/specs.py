"""All hooks. A plugin implements any of them with ``@forebay.hooks.hookimpl``, naming the arguments it needs."""

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from forebay.core.ids import InstanceId
    from forebay.hooks.types import Group, Item

PROJECT = "forebay"
"""Name of the markers, and of the entry-point group of installed plugins."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

READ_HOOKS = (
    "get_group_data_meta_info",
    "is_valid_group",
    "filter_item",
    "normalize_group_data",
    "pad_group_data",
    "transform_group",
)
"""Hooks called by a read. The first answer that is not None counts."""

NOTIFICATIONS = ("run_started", "run_ended", "group_closed", "batch_delivered")
"""Hooks called on every implementation, until one raises. Nothing waits for them, and return values are dropped."""

CONTRACT_HOOKS = {
    "A": ("filter_item", "normalize_group_data", "pad_group_data"),
    "B": ("transform_group",),
}
"""Hooks that each contract calls for a valid group, in this order."""


@hookspec(firstresult=True)
def get_group_data_meta_info(temp_data: "dict[InstanceId, list[Item]]", task_type: str) -> dict[str, Any] | None:
    """Return the ``meta_info`` of a reply, which describes the groups that arrived.

    Called once per read that found a valid group, before the filter of any group.
    """


@hookspec(firstresult=True)
def is_valid_group(
    group: "Group", group_size: int, min_valid_group_size: int, task_type: str
) -> tuple[bool, bool] | bool | None:
    """Decide whether a group may go to the trainer: ``(is_valid, is_finished)``, or a plain bool.

    Called at a read, for each open group that changed since it was last asked, and when the group is full. The answer
    must depend only on the arguments.
    """


@hookspec(firstresult=True)
def filter_item(item: "Item", task_type: str) -> bool | None:
    """Decide whether a sample of a valid group is kept. Called under contract A, for each sample, first."""


@hookspec(firstresult=True)
def normalize_group_data(group: "Group", task_type: str) -> "Group | None":
    """Turn the rewards of the kept samples into training values. Called under contract A, after the filter."""


@hookspec(firstresult=True)
def pad_group_data(group: "Group", group_size: int, task_type: str) -> "Group | None":
    """Pad a normalised group to ``group_size`` rows. Called under contract A, last."""


@hookspec(firstresult=True)
def transform_group(group: "Group", task_type: str) -> "Group | None":
    """Turn a valid group into the rows to deliver. Called under contract B, in place of filter, normalise and pad."""


@hookspec
def run_started(run_id: str, task_type: str, name: str) -> None:
    """Notify that a run was accepted under ``name`` ("" for the default run). Called before its process starts."""


@hookspec
def run_ended(run_id: str, task_type: str, state: str, reason: str) -> None:
    """Notify that a run has ended, with state and reason. Called once no further sample can join a group."""


@hookspec
def group_closed(
    run_id: str, task_type: str, group_id: str, instance_id: "InstanceId", epoch: int, state: str, reason: str
) -> None:
    """Notify that a group accepts no more samples. Called when it becomes ready or is discarded for ``reason``."""


@hookspec
def batch_delivered(run_id: str, task_type: str, batch_id: str, num_groups: int, num_rows: int) -> None:
    """Notify that a batch has reached the trainer. Called when it is acknowledged, or its last byte was sent."""
