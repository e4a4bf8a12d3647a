"""A Ray cluster of this machine for tests, one for all of them; Ray ends it with this process."""

import logging


def join_cluster(num_cpus: int = 16) -> None:
    """Be connected to one that has more CPUs than this machine may have."""
    import ray

    if not ray.is_initialized():
        ray.init(
            address="local",
            num_cpus=num_cpus,
            resources={"probe": 2},
            namespace="forebay",
            include_dashboard=False,
            logging_level=logging.WARNING,
        )
