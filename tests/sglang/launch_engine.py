"""Start a real SGLang engine on a plain CPU. Takes the arguments of ``sglang.launch_server``."""

import os
import sys

from cpu_stand_ins import put_in_place

# At import, not in main: the processes that SGLang spawns import this file again and need it as well.
put_in_place()

from sglang.srt.mem_cache.pool_host import common  # noqa: E402 - needs the stand-ins

# Pins the host memory of routed experts, which only CUDA can do.
common._cuda_host_register = lambda *_, **__: None


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
