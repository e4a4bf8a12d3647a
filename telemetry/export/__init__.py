"""A trace in the formats of others: Perfetto and OpenTelemetry.

``perfetto.py`` draws a trace:
``attempt_tracks.py`` says what is on which track, ``trace_events.py`` writes the file. ``otlp.py`` sends them to a
collector as the spans of ``otel_spans.py``, with the names of ``semantic_conventions.py``. Both make what lasted out of
moments of the server with ``server_intervals.py``.
"""
