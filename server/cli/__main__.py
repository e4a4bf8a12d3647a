"""``python -m forebay.server.cli``: the command line without its installed script."""

from forebay.server.cli import main

if __name__ == "__main__":
    main()
