"""Typed access to hooks: one method per hook, with checked answers and attributed failures."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import pluggy

from forebay.core.errors import HookFailed
from forebay.core.ids import InstanceId
from forebay.hooks import answer_checks, specs
from forebay.hooks.types import Group, Item, Sizes, Verdict

BUILT_IN = "built-in"
"""Name of the registered default behaviour."""


def as_it_is(answer: Any) -> Any:
    """Return ``answer`` unchanged: the default ``complete``, for hooks that are not coroutines."""
    return answer


def unheard(_hook: str) -> None:
    """Do nothing: the default ``on_ask``."""


class HookManager:
    """Wraps a pluggy manager for one task type. Raises ``HookFailed`` if a hook fails or returns an invalid answer.

    ``complete`` waits for coroutines that plugins return. ``on_ask`` is called with each hook's name before the hook.
    """

    def __init__(
        self, task_type: str, *, complete: Callable[[Any], Any] = as_it_is, on_ask: Callable[[str], None] = unheard
    ) -> None:
        self._task_type = task_type
        self._complete = complete
        self._on_ask = on_ask
        self._plugins = pluggy.PluginManager(specs.PROJECT)
        self._plugins.add_hookspecs(specs)

    def register(self, plugin: object, name: str) -> None:
        """Add a plugin; the last one added is called first. Raises ``ValueError`` if it implements an unknown hook."""
        self._plugins.register(plugin, name)
        # Without this, a marked function that is not a hook would silently never be called.
        self._plugins.check_pending()

    def get_group_data_meta_info(self, temp_data: dict[InstanceId, list[Item]]) -> dict[str, Any]:
        """Return the ``meta_info`` of a reply."""
        hook = "get_group_data_meta_info"
        return answer_checks.check_object(hook, self._ask(hook, temp_data=temp_data))

    def is_valid_group(self, group: Group, sizes: Sizes) -> Verdict:
        """Decide whether the group may go to the trainer."""
        hook, least = "is_valid_group", sizes.min_valid_group_size
        answer = self._ask(hook, group=group, group_size=sizes.group_size, min_valid_group_size=least)
        return answer_checks.check_verdict(hook, answer, len(group[1]), sizes)

    def filter_item(self, item: Item) -> bool:
        """Decide whether the sample is kept."""
        return answer_checks.check_truth("filter_item", self._ask("filter_item", item=item))

    def normalize_group_data(self, group: Group) -> Group:
        """Turn rewards into training values."""
        hook = "normalize_group_data"
        return answer_checks.check_group(hook, self._ask(hook, group=group), group[0])

    def pad_group_data(self, group: Group, group_size: int) -> Group:
        """Pad the group to ``group_size`` rows."""
        hook = "pad_group_data"
        return answer_checks.check_group(hook, self._ask(hook, group=group, group_size=group_size), group[0])

    def transform_group(self, group: Group) -> Group:
        """Turn the group into the rows to deliver."""
        hook = "transform_group"
        return answer_checks.check_group(hook, self._ask(hook, group=group), group[0])

    def notify(self, event: str, payload: Mapping[str, Any]) -> None:
        """Call every implementation of a notification. Arguments that ``payload`` lacks are None."""
        wanted = inspect.signature(getattr(specs, event)).parameters
        self._ask(event, **{name: payload.get(name) for name in wanted if name != "task_type"})

    def implementations(self) -> dict[str, list[str]]:
        """Return the names of the plugins that implement each hook, in call order."""
        return {hook: self._implementers(hook) for hook in specs.READ_HOOKS + specs.NOTIFICATIONS}

    def _implementers(self, hook: str) -> list[str]:
        found = getattr(self._plugins.hook, hook).get_hookimpls()
        # pluggy lists the last one called first.
        return [implementation.plugin_name for implementation in reversed(found)]

    def _ask(self, hook: str, **arguments: object) -> Any:
        self._on_ask(hook)
        try:
            answer = getattr(self._plugins.hook, hook)(task_type=self._task_type, **arguments)
            # pluggy returns all answers as a list for notifications, and the first that is not None for other hooks.
            if hook in specs.NOTIFICATIONS:
                return [self._complete(part) for part in answer]
            return self._complete(answer)
        except HookFailed:
            raise
        except BaseException as error:  # noqa: BLE001  even a user's SystemExit fails one group and not the host
            raise answer_checks.raised(hook, error) from None
