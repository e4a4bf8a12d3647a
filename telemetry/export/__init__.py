"""Exports traces to other formats: Perfetto and OpenTelemetry.

``span_trees.py`` makes trees of spans from all records. ``perfetto.py`` draws them into a file; ``otlp.py`` sends them
to a collector, as the spans of ``otel_spans.py``.
"""
