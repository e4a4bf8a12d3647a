"""Which generators there are, found without importing any of them here.

``catalog.py`` is what the server and the CLI ask: at each look ``files.py`` goes through the folders, the given files
and the entry points, and reads what the source text says (``payload_fields.py``: of the fields of a start;
``agent_judges.py``: of who judges agents); each file that is new or was edited is inspected by ``inspector.py``, which
starts ``inspect_child.py`` in a process of its own; there ``shared_globals.py`` finds what the file's hooks will not
see. ``info.py`` has the verdict on a file, and which of several files answers for a task type. ``module_loading.py``
imports a generator file, there and in the run process. ``scaffold.py`` writes a file to begin with.
"""
