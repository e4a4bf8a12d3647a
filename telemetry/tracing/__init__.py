"""Recording: where the time of every rollout and read goes, as lines of JSON below the run's ``trace/`` folder.

``records.py`` says what a line may be, ``trace_ids.py`` which trace and which share of groups it belongs to.
``read_trace.py`` reads lines back.

Who opens a span: ``tracer.py`` starts tracing, and has ``span`` for user code; a ``run_tracer.py`` is one run as one
process records it, with an ``attempt_trace.py`` for each attempt of a rollout. Both have their spans from ``spans.py``,
and ``attributes.py`` cuts what is written of them. ``exclusive_time.py`` says what part of an attempt each phase was.
Where nothing is traced there is ``no_trace.py``. ``stall_watch.py`` sees event loops stand still.

Who writes it: records wait in the ``record_queue.py`` of their tracer until the process's one ``FlushThread``, of
``run_tracer.py``, has them written to a ``trace_file.py``. ``trace_budget.py`` keeps all files of a run within bounds.
"""
