"""``python -m forebay.server.cli.demo.child PARENT_PID MODULE …``: run a module that dies with its parent."""

import runpy
import sys

from forebay.core.child_process import die_with_parent


def main() -> None:
    """Tie this process to its parent, then become ``python -m MODULE …``."""
    parent_pid, module, *arguments = sys.argv[1:]
    die_with_parent(int(parent_pid))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
