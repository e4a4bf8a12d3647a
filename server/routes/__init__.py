"""Every route, one file per resource; a handler parses, calls and returns.

There are two kinds. Routes that carry samples are plain ASGI without the framework. ``sample_routes`` finds the route
and the run from the path, reads the body and turns errors into replies. ``write_samples`` stores samples with their
parts; ``read_batches`` leases batches and sends them, with ``tensor_replies`` if a trainer asks for tensors;
``read_parts`` sends parts; ``annotations`` stores and lists what a trainer notes about samples. ``openapi`` adds these
routes to the framework's document, and answers other methods on their paths.

The other routes are FastAPI's: ``slime_runs`` (slime's client, except its samples), ``runs`` (start, stop, inspect),
``exports`` (a run's trace and its recording, as files), ``groups``, ``bodies`` (of single samples), ``batches``
(acknowledge, release, extend, checkpoints, rewind), ``weights`` (versions, updates, pauses), ``run_process`` (requests
of a run's own process, protected by the run's key) and ``operations`` (health, metrics, retention). Routes that only
the page uses are in ``ui``.

Native routes start with ``/v1``, those of a run's key with ``/w/{run_key}``. slime's are at the root and under
``/s/{name}``. Errors have one body everywhere; slime's routes wrap it in slime's envelope.
"""
