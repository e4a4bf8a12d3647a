"""Exports traces to other formats: Perfetto and OpenTelemetry.

``perfetto.py`` draws a trace; ``trace_events.py`` arranges spans on tracks and writes the file. ``otlp.py`` sends the
spans of ``otel_spans.py`` to a collector, with the names of ``semantic_conventions.py``. Both use
``server_intervals.py`` to turn moments recorded by the server into intervals.
"""
