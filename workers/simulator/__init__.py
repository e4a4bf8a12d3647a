"""A run in virtual time: the real job, groups, hold and policies, over engines and a trainer that are models.

``scenario.py`` is the way in: what is to be simulated, and ``simulate``, which puts a job together and runs it in the
event loop of ``virtual_loop.py``. ``populations.py`` knows how long answers are, ``cost.py`` what an engine takes for
them. What the job meets in place of the real parts: ``modelled_engines.py`` with one ``engine_model.py`` for each
engine, ``modelled_runner.py`` (rollouts, and the writer), ``modelled_trainer.py`` (the buffer, and the trainer).

``attempt_records.py`` keeps what the job's trace says of each attempt.
``simulated_source.py`` is what ``forebay simulate`` is about: a population, or a log, which ``recorded/`` reads.
``scenario_grid.py`` varies its scenario, by what ``simulation_settings.py`` lets be set; ``run_measures.py`` says what
a run was worth, ``result_rows.py`` what several seeds come to, and ``pareto_plot.py`` draws them. Run processes import
nothing from here.
"""
