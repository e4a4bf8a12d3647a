"""A trace of ours as steps and requests.

``trace_index`` is what a trace tells beside its rollouts, and ``step_plan`` says which reads and groups make a step.
``trace_requests`` and ``span_events`` make requests of the attempts of rollouts.
"""
