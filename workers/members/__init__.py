"""One member of a worker group, on any backend.

``worker`` has the base class of users' workers, and a user's class with the arguments to construct it on the worker.
``worker_spec`` has what a worker and its controller exchange: spec, calls, vitals, failures.
``host`` constructs the classes of one process and runs calls on them, with an event loop in its own thread.
``worker_errors`` has the errors.
"""
