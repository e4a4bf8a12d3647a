"""Which generators there are, found without importing any of them here.

``catalog.py`` is what the server and the CLI ask: at each look ``files.py`` goes through the folders, the given files
and the entry points, and reads the source text for task types. ``inspector.py`` inspects each file that is new or was
edited, in a process of its own (``inspect_child.py``). ``info.py`` has the verdict on a file, and which of several
files answers for a task type. ``module_loading.py`` imports a generator file, there and in the run process.
``scaffold.py`` writes a file to begin with.
"""
