"""Discovery of generators, without importing any of them in the server.

The server and the CLI use ``catalog.py``. For each scan, ``files.py`` searches the folders, the given files and the
entry points, and reads task types from the source text. ``inspector.py`` inspects each new or edited file in a separate
process (``inspect_child.py``). ``info.py`` has the verdict on a file, and chooses between files of the same task type.
``module_loading.py`` imports a generator file, in the inspection and in the run process. ``scaffold.py`` writes a new
generator file.
"""
