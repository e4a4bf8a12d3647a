"""``python -m forebay.engines.tiny``: the embedded engine as a process of its own."""

import argparse
import sys
from pathlib import Path

from forebay.core.errors import ForebayError
from forebay.engines.tiny.engine import DEFAULT_NAME
from forebay.engines.tiny.server import serve


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments and serve; 2 with the reason on stderr where that cannot start."""
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
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one; the ready line on stdout tells it")
    parser.add_argument("--model-path", type=Path, help="a Hugging Face folder; without it the built-in model")
    parser.add_argument("--threads", type=int, default=1, help="cores that torch may use")
    parser.add_argument("--max-rows", type=int, default=64, help="choices generated at once")
    parser.add_argument("--name", default=DEFAULT_NAME, help="the model's name on the wire")
    parser.add_argument(
        "--allowed-hosts", default="", metavar="NAMES", help="by which the engine may be called besides its machine's"
    )
    parser.add_argument("--insecure", action="store_true", help="let it be called by every name")
    return parser


if __name__ == "__main__":
    sys.exit(main())
