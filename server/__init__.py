"""The server process: HTTP routes, run supervision, and the command line."""
