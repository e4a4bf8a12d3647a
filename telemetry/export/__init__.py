"""A trace in the formats of others: Perfetto, the published layout of logs, OpenTelemetry.

``follow_log.py`` brings the lines of a trace to an exporter, once or as they come. ``perfetto.py`` draws them:
``attempt_tracks.py`` says what is on which track, ``trace_events.py`` writes the file. ``otlp.py`` sends them to a
collector as the spans of ``otel_spans.py``, with the names of ``semantic_conventions.py``. Both make what lasted out of
moments of the server with ``server_intervals.py``.
``published.py`` writes the published layout, whose lines ``published_step.py`` makes; ``followed_steps.py`` does so
while a trace grows.
"""
