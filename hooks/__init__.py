"""The hooks by which users change what a read does to groups, and the process in which theirs run.

``specs`` names every hook and says when it is called, ``types`` has what they are given and give. The buffer has one
``HookRunner`` (``run_hooks``) for each run:

    judge, process, meta_info
      ├── nobody but the built-in behaviour answers: ``defaults``, on columns, in process
      └── else: ``host_client`` ── ``host_messages`` ──▶ ``host``, a child process, whose ``host_output`` is kept

In the child, ``plugin_loading`` fills a ``manager`` with the installed plugins, the generator file (``plain_functions``
binds functions as slime knows them) and the defaults; ``group_sequence`` asks it, in the order of a read; what is
answered goes through ``answer_checks``. ``contract`` decides which of slime's two sets of functions a file follows,
``check`` what can be known of its hooks without calling any. ``advantages`` is the arithmetic of normalising and
padding. ``notifier`` queues what plugins are notified of.

A hook that raises, hangs or dies costs its group (``HookFailed``, with the traceback), never the server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.hooks.run_hooks import HookRunner
    from forebay.hooks.specs import hookimpl
    from forebay.hooks.types import HookInput, Processed, Row, Sizes, Verdict

__all__ = ["HookInput", "HookRunner", "Processed", "Row", "Sizes", "Verdict", "hookimpl"]

_MODULES = {"HookRunner": "run_hooks", "hookimpl": "specs"}


def __getattr__(name: str) -> Any:
    """Each name loads its own module alone: an inspection and a hook host need little of what a runner needs."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'types')}"), name)
