"""Links from a run process to its buffer: plan, progress reports, closed groups and the writing of samples.

``abc.py`` defines what both buffers share: ``Plan``, ``ProgressReport``, ``ClosedGroups``, and ``Link`` with one method
for each. A link repeats its calls until the buffer answers. ``Link.writer`` returns the writer of
``forebay.client.sample_writer`` configured for a run: it retries without limit and raises ``RunGone`` once the run is
over. ``forebay.py`` is the link to ``/w/{run_key}`` of a Forebay server, which has a feed of closed groups and accepts
failed samples. ``slime.py`` is the link to slime's own buffer, which only accepts one completed sample per call.
"""
