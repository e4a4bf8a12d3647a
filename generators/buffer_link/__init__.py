"""The way from a run process to its buffer: what is asked and reported, and how samples are written.

``abc.py`` has what both buffers have in common: the ``Plan`` at the start, ``ProgressReport``, ``ClosedGroups``, and
a ``Link`` with one method for each, whose calls are made again until they are answered. ``Link.writer`` is the writer
of ``forebay.client.sample_writer``, with the manners of a run: it tries without end, and ``RunGone`` is raised where
the run is over. ``forebay.py`` is the link to ``/w/{run_key}`` of a Forebay server, which has a feed of closed groups
and takes failed samples; ``slime.py`` that to slime's own buffer, which takes one completed sample at a time and says
nothing.
"""
