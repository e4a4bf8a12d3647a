"""What a run starts next, and where: the types that the job, its policies and the server share.

``policy`` defines the policy that a job asks for every free slot, and its inputs and results, and finds policies by
name, as entry points; ``engine_loads`` describes the engines to it. ``scheduler`` has the settings of a run's policy,
and ``scheduler_checks`` validates them. ``oversampling`` starts more rollouts than a step needs.
"""
