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
padding.

A hook that raises, hangs or dies costs its group (``HookFailed``, with the traceback), never the server.
"""

from typing import TYPE_CHECKING

from forebay.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from forebay.hooks.run_hooks import HookRunner
    from forebay.hooks.specs import hookimpl
    from forebay.hooks.types import HookInput, Processed, Row, Sizes, Verdict

__all__ = ["HookInput", "HookRunner", "Processed", "Row", "Sizes", "Verdict", "hookimpl"]

# An inspection and a hook host need little of what a runner needs.
__getattr__ = lazy_names(
    __name__,
    {
        "HookRunner": "forebay.hooks.run_hooks",
        "hookimpl": "forebay.hooks.specs",
        **dict.fromkeys(("HookInput", "Processed", "Row", "Sizes", "Verdict"), "forebay.hooks.types"),
    },
)
