"""Every route, one file for each resource; a handler parses, calls and returns.

Two kinds come in. What carries samples is plain ASGI and never meets the framework: ``sample_routes`` finds the route
and the run by the path, reads the body and turns errors into replies; ``write_samples`` takes samples in,
``read_batches`` leases batches and sends them, with ``tensor_replies`` where a trainer asks for tensors. ``openapi``
names these routes in the framework's document, and answers other methods on their paths.

The others are FastAPI's: ``slime_runs`` (slime's client, but for its samples), ``runs`` (start, stop, look),
``exports`` (a run's trace and its recording, as files), ``groups``, ``batches`` (acknowledge, release, extend,
checkpoints, rewind), ``weights`` (versions, updates, pauses), ``run_process`` (what a run's own process asks, behind
the run's key) and ``operations`` (health, metrics, retention).

Native routes lie under ``/v1``; those of a run's key under ``/w/{run_key}``; slime's at the root and under
``/s/{name}``. Errors have one body everywhere; slime's put its envelope around it.
"""
