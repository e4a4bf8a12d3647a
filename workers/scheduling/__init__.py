"""Policies: which rollout is started next, on which engine, and how much it may sample.

``pull`` is the default, ``static`` the baseline that binds each rollout to an engine in advance. ``longest_first``
goes by how long answers will be: ``lengths`` predicts that, and ``history`` is what earlier epochs and runs have
recorded. ``probe`` runs one rollout of each group first: ``probe_ranking`` says which groups are long by them,
``heavy_engines`` which engines are for those, ``rollout_line`` has what waits, for any engine or for one. What several
of them need: ``waiting_groups`` (who was passed over how often) and ``started_groups`` (of which rollouts are left).
Settings and protocol are in ``forebay.core.scheduling``.
"""
