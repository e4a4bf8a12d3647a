"""Environments whose libraries conflict with Forebay's: each runs in one long-lived child with a Python of its own.

A generator enters an ``EnvironmentChild`` (``child.py``) and calls the child's methods; Forebay does the rest: rows,
groups, attempts, deadlines, recording. The child is started through ``child_tree.py``, which leaves none of its
processes behind. ``child_main.py`` is its main. It and the environments themselves (``*_child.py``) run with the Python
of the setting ``environment_python``, and import nothing of Forebay.

- ``verifiers_child.py``: tasksets of verifiers.
- ``harbor_child.py``: tasks and trials of Harbor. ``harbor_process.py`` runs them without a container, in namespaces
  that ``harbor_namespace.py`` makes.
"""
