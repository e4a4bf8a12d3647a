"""Start the real router. Its own ``sglang_router.launch_router`` would import the whole engine."""

import argparse

from sglang_router.router import Router
from sglang_router.router_args import RouterArgs


def main() -> None:
    parser = argparse.ArgumentParser()
    RouterArgs.add_cli_args(parser, use_router_prefix=False)
    Router.from_args(RouterArgs.from_cli_args(parser.parse_args(), use_router_prefix=False)).start()


if __name__ == "__main__":
    main()
