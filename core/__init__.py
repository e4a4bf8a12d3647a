"""Types and helpers that all of Forebay shares; imports nothing else of it. Only ``settings`` and ``run`` load slowly.

- Vocabulary: ``ids``, ``group`` (states, transitions, reasons), ``run`` (with ``starts``: its start parameters),
  ``outcome``, ``weight_versions``, ``task_row`` (an instance, read from a line of the input file).
- More vocabulary: ``scheduling`` (policies and their inputs), ``errors`` (each with a code, a status and a hint),
  ``settings`` (the server's).
- Samples: ``sample`` reads the few fields that are needed on arrival, from JSON or ``binary_sample``.
  ``batch_tensors`` arranges a batch as arrays, in the ``safetensors_format``. ``parts`` has side arrays. ``records``
  defines how samples are stored on disk, and replaces the reward in a stored body.
- Async tools: ``backoff`` (pauses, time limits), ``tasks`` (background tasks), ``waiting`` (for a change).
- Processes: ``child_process`` (ends with its parent), ``processes`` (messages between a parent and its child).
- Other tools: ``clock``, ``addresses``, ``fields`` (of a payload), ``files`` (private and durable),
  ``lazy_names`` (packages that load when needed, and optional ones).
"""
