"""Start a real SGLang engine on a plain CPU. Takes the arguments of ``sglang.launch_server``."""

import os
import sys

from cpu_stand_ins import put_in_place

# At import, not in main: the processes that SGLang spawns import this file again and need it as well.
put_in_place()


def main() -> None:
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
