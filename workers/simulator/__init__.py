"""Simulates a run in virtual time: the real job, groups, step barrier and policies, over modelled engines and trainer.

``scenario.py`` is the entry point: the scenario, and ``simulate``, which assembles a job and runs it in the event loop
of ``virtual_loop.py``. ``populations.py`` has the lengths of answers, ``cost.py`` the time that an engine needs.
Models replace the real parts of the job: ``modelled_engines.py`` with one ``engine_model.py`` for each engine,
``modelled_runner.py`` (rollouts and the writer), ``modelled_trainer.py`` (the buffer and the trainer).

``attempt_records.py`` keeps the trace summary of each attempt.
``simulated_source.py`` is the source of ``forebay simulate``: a population, or a log, which ``recorded/`` reads.
``scenario_grid.py`` varies its scenario by the settings of ``simulation_settings.py``. ``run_measures.py`` measures a
run, ``result_rows.py`` combines several seeds, and ``pareto_plot.py`` draws the results. Run processes import nothing
from here.
"""
