"""What a run starts next, and where: the types that the job, its policies and the server share.

``policy`` defines the policy that a job asks for every free slot, and its inputs and results; ``engine_loads``
describes the engines to it. ``scheduler`` has the settings of a run's policy, ``scheduler_checks`` validates them,
and ``policies`` finds policies by name, as entry points. ``oversampling`` starts more rollouts than a step needs.
"""
