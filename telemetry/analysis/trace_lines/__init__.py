"""A trace of ours, line by line, to what steps are made of.

``trace_sources`` knows where lines are, so that a step's can be read again; ``trace_index`` is what is kept of all of
them; ``step_plan`` says which reads and groups make a step. ``trace_requests`` and ``span_events`` make requests of a
step's lines, and ``barrier_times`` says how long engines stood.
"""
