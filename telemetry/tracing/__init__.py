"""Records where the time of every rollout and read goes, as lines of JSON in the run's ``trace/`` folder.

``records.py`` defines the lines. ``trace_ids.py`` computes the trace of a line, and whether its group's spans are kept.
``read_trace.py`` reads lines.

Opening spans: ``tracer.py`` starts tracing and has ``span`` for user code, and what is used without tracing. A
``run_tracer.py`` records one run in one process, with an ``attempt_trace.py`` for each attempt of a rollout. Both use
the spans of ``spans.py``. ``exclusive_time.py`` computes the share of each phase in an attempt. ``stall_watch.py``
detects blocked event loops.

Writing: records wait until the process's only ``FlushThread``, in ``run_tracer.py``, writes them to a
``trace_file.py``. ``trace_budget.py`` limits the size of all files of a run.
"""
