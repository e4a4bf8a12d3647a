"""One member of a worker group, wherever it runs.

``worker`` is what a user's class derives from, and what names that class with its arguments, to be made on the worker.
``worker_spec`` has what passes between a worker and whoever started it: its spec, calls, signs of life, failures.
``host`` makes the classes of one process and runs calls on them, with an event loop in a thread of its own.
``worker_errors`` has what goes wrong.
"""
