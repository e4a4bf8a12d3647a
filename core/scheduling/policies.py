"""Finds policies by name: entry points in the group ``forebay.policies``, from Forebay and others."""

from typing import TYPE_CHECKING

from forebay.core.errors import InvalidInput
from forebay.core.scheduling.policy import MakePolicy, Policy, PolicyInputs

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "forebay.policies"
FIELD = "scheduler.policy"


def check_policy(name: str) -> None:
    """Raise ``InvalidInput`` if no policy of this name is installed."""
    _find(name)


def make_policy(inputs: PolicyInputs) -> Policy:
    """Make the policy that the settings name. Raises ``InvalidInput``, also if it cannot be loaded."""
    name = inputs.settings.policy
    found = _find(name)
    try:
        make: MakePolicy = found.load()
    except (ImportError, AttributeError) as error:
        raise InvalidInput(f"the policy {name!r} cannot be loaded: {error}", field=FIELD) from error
    return make(inputs)


def _find(name: str) -> "EntryPoint":
    known = _installed()
    if name not in known:
        raise InvalidInput(
            f"there is no policy {name!r:.100}",
            hint=f"known policies: {', '.join(sorted(known))}; others are entry points of {ENTRY_POINT_GROUP}",
            field=FIELD,
        )
    return known[name]


def _installed() -> "dict[str, EntryPoint]":
    from importlib.metadata import entry_points  # would be a third of the imports of a run process without a policy

    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
