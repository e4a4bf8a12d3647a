"""Hooks by which users change how a read processes groups, and the process in which users' hooks run.

``specs`` defines every hook and when it is called; ``types`` has their arguments and results. The buffer has one
``HookRunner`` (``run_hooks``) per run:

    judge, process, meta_info
      ├── only the built-in behaviour answers: ``defaults``, on columns, in process
      └── else: ``host_client`` ── ``host_messages`` ──▶ ``host``, a child process, whose ``host_output`` is kept

In the child, ``plugin_loading`` fills a ``manager`` with the installed plugins, the generator file (``plain_functions``
binds functions in slime's style) and the defaults. ``group_sequence`` calls the hooks in the order of a read, and
``answer_checks`` checks their answers. ``contract`` decides which of slime's two sets of functions a file follows.
``check`` finds problems of a file's hooks without calling them. ``advantages`` has the arithmetic of normalising and
padding.

A hook that raises, hangs or dies fails its group (``HookFailed``, with the traceback), never the server.
"""

from typing import TYPE_CHECKING

from forebay.core.lazy_names import lazy_names, require_extra

if TYPE_CHECKING:
    from forebay.hooks.run_hooks import HookRunner
    from forebay.hooks.specs import hookimpl
    from forebay.hooks.types import HookInput, Processed, Row, Sizes, Verdict

__all__ = ["HookInput", "HookRunner", "Processed", "Row", "Sizes", "Verdict", "hookimpl"]

require_extra("server", "pluggy")

# Lazy, because inspections and hook hosts need few of these modules.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "HookRunner": "forebay.hooks.run_hooks",
        "hookimpl": "forebay.hooks.specs",
        **dict.fromkeys(("HookInput", "Processed", "Row", "Sizes", "Verdict"), "forebay.hooks.types"),
    },
)
