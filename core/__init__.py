"""The words that every part of Forebay shares. Imports nothing of ours; only ``settings`` and ``run`` load slowly.

Words
    ``ids``, ``group`` (states, transitions, reasons), ``run``, ``outcome``, ``weight_versions``, ``oversampling``,
    ``task_row`` (an instance, out of a line of the input file), ``errors`` (each with a code, a status and a hint),
    ``settings`` (those of the server).
Samples
    ``sample`` reads the few fields of a body that are looked at on arrival, JSON or ``binary_sample``;
    ``reward_place`` puts another reward into a stored body; ``batch_tensors`` lays a batch out as arrays, in the
    ``safetensors_format``.
Tools that have one implementation each
    ``backoff`` (pauses between tries), ``tasks`` (tasks that run beside their starter), ``waiting`` (for news),
    ``clock``, ``addresses``, ``chunking``, ``fields`` (of a payload), ``child_process`` (death with the parent).
"""
