"""Writes the rollouts of a recording in formats that other tools read.

``rollouts`` reads a recording rollout by rollout, within selected steps, groups and rewards, and collects what cannot
be read. ``exporter`` finds the writer of a format, an entry point of the group ``forebay.exporters``, and gives the
output its name once it is complete. Writers are there (JSON Lines), in ``parquet`` and in ``atif``; ``atif_steps``
makes the steps of a trajectory from the messages and tokens of a sample.

A writer of your own is a function with the type ``Exporter``: a context manager that takes a path and the recording,
and yields a function that writes one ``ExportedRollout``.
"""
