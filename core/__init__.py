"""The words that every part of Forebay shares. Imports nothing of ours; only ``settings`` and ``run`` load slowly.

Words
    ``ids``, ``group`` (states, transitions, reasons), ``run`` (and in ``starts`` what it is started with),
    ``outcome``, ``weight_versions``, ``task_row`` (an instance, out of a line of the input file),
    ``scheduling`` (policies, and what they are told), ``errors`` (each with a code, a status and a hint), ``settings``
    (those of the server).
Samples
    ``sample`` reads the few fields of a body that are looked at on arrival, JSON or ``binary_sample``;
    ``reward_place`` puts another reward into a stored body; ``batch_tensors`` lays a batch out as arrays, in the
    ``safetensors_format``.
    ``records`` is how they lie on disk.
Tools that have one implementation each
    ``backoff`` (pauses between tries), ``tasks`` (tasks that run beside their starter), ``waiting`` (for news),
    ``clock``, ``addresses``, ``fields`` (of a payload), ``child_process`` (death with the parent), ``processes``
    (messages between a parent and its child),
    ``files`` (nobody's but their owner's, and lasting), ``lazy_names`` (of packages whose modules load when needed).
"""
