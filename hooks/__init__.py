"""The hooks by which users change what a read does to groups, and the process in which theirs run."""

from forebay.hooks.run_hooks import HookRunner
from forebay.hooks.specs import hookimpl
from forebay.hooks.types import HookInput, Processed, Row, Sizes, Verdict

__all__ = ["HookInput", "HookRunner", "Processed", "Row", "Sizes", "Verdict", "hookimpl"]
