"""Recording: where the time of every rollout and read goes, as lines of JSON below the run's ``trace/`` folder.

``records.py`` says what a line may be, ``trace_ids.py`` which trace and which share of groups it belongs to.
``read_trace.py`` reads lines back, ``trace_writers.py`` says who wrote them and brings their times to one clock.

In: ``tracer.py`` starts tracing, and has ``span`` for user code; a ``run_tracer.py`` is one run as one process records
it, with an ``attempt_trace.py`` for each attempt of a rollout. Both are a ``span_scope.py``, which makes a
``span_handle.py`` for each span. ``exclusive_time.py`` says what part of an attempt each phase was. Where nothing is
traced there is ``no_trace.py``. ``loop_watch.py`` sees event loops stand still.

Out: records wait in a ``record_queue.py`` until the process's ``flush_thread.py`` writes them to its ``trace_file.py``.
``trace_budget.py`` keeps all files of a run within their bounds.
"""
