"""``python -m forebay.engines.tiny``: run the embedded engine as its own process."""

import argparse
import sys
from pathlib import Path

from forebay.core.errors import ForebayError
from forebay.engines.tiny.engine import DEFAULT_NAME
from forebay.engines.tiny.server import serve


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments and serve. Returns 2, with the reason on stderr, if the engine cannot start."""
    options = _parser().parse_args(arguments)
    try:
        serve(**vars(options))
    except (ForebayError, OSError) as error:
        hint = getattr(error, "hint", "")
        sys.stderr.write(f"{error}{f' ({hint})' if hint else ''}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m forebay.engines.tiny", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free port; the ready line on stdout shows it")
    parser.add_argument("--model-path", type=Path, help="a Hugging Face folder; the built-in model by default")
    parser.add_argument("--threads", type=int, default=1, help="number of cores that torch may use")
    parser.add_argument("--max-rows", type=int, default=64, help="choices generated at once")
    parser.add_argument("--name", default=DEFAULT_NAME, help="model name in requests and replies")
    parser.add_argument(
        "--allowed-hosts", default="", metavar="NAMES", help="host names to accept besides this machine's own"
    )
    parser.add_argument("--insecure", action="store_true", help="accept every host name")
    return parser


if __name__ == "__main__":
    sys.exit(main())
