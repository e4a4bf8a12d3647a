"""What a run starts next, and where: the words that the job, its policies and the server share.

``policy`` is what a job asks for every free place, and the values that go to and fro; ``engine_loads`` is what it is
told of the engines. ``scheduler`` has the settings of a run's policy, ``scheduler_checks`` says whether they can work,
and ``policies`` finds policies by name, as entry points. ``oversampling`` is about more rollouts than a step needs.
"""
