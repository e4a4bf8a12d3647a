"""A trace in the formats of others: Perfetto and OpenTelemetry.

``perfetto.py`` draws a trace, ``trace_events.py`` puts spans on tracks and writes the file. ``otlp.py`` sends them to a
collector as the spans of ``otel_spans.py``, with the names of ``semantic_conventions.py``. Both make what lasted out of
moments of the server with ``server_intervals.py``.
"""
