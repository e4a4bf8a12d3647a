"""The connection of this process to a Ray cluster."""

import logging
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from forebay.core.errors import InvalidInput, MissingExtra
from forebay.workers.members.worker_errors import WorkerError

NAMESPACE = "forebay"
REACHING_S = 10.0
"""Ray itself goes on for minutes."""
_TOKEN = secrets.token_hex(32)
"""Of every cluster that this process starts: Ray reads one once, and makes one in a file that other users can read."""
_connecting = threading.Lock()


def connect(address: str | None, namespace: str | None) -> None:
    """Connect this process to a Ray cluster, unless it is connected already.

    The cluster is the one at ``address``, or at ``RAY_ADDRESS``; without both, one is started for this process alone,
    with a token. Raises ``MissingExtra``, ``InvalidInput``, and ``WorkerError`` if no cluster answers.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "ray") from None
    wanted = address or os.environ.get("RAY_ADDRESS") or "local"
    with _connecting:
        if not ray.is_initialized():
            check_address(wanted)
            _initialise(wanted, namespace or NAMESPACE)
        elif address not in (None, "auto", ray.get_runtime_context().gcs_address):
            raise InvalidInput(
                f"this process is connected to the Ray cluster at {ray.get_runtime_context().gcs_address} already",
                field="ray_address",
                hint="a process belongs to one cluster; leave the address out, or call ray.shutdown() before",
            )


def check_address(address: str) -> None:
    """Raises what is wrong with it, before Ray tries for minutes."""
    if address in ("local", "auto"):
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdecimal():
        raise InvalidInput(
            f"{address!r} is no address of a Ray cluster",
            field="ray_address",
            hint="HOST:PORT of its head node, as `ray start --head` prints it (6379 by default), or 'auto'",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACHING_S).close()
    except OSError as error:
        raise WorkerError(
            f"no Ray cluster answers at {address}: {error}",
            hint="ray start --head starts one; no other cluster was started in its place",
        ) from error


def has_other_machines() -> bool:
    """Whether the cluster that this process is connected to has nodes with other addresses than its own."""
    import ray

    own = ray.util.get_node_ip_address()
    return any(node["Alive"] and node["NodeManagerAddress"] != own for node in ray.nodes())


def _initialise(address: str, namespace: str) -> None:
    import ray

    with _own_settings() if address == "local" else nullcontext():
        try:
            ray.init(
                address=address,
                namespace=namespace,
                include_dashboard=False if address == "local" else None,
                logging_level=logging.WARNING,
                log_to_driver=True,  # what workers print is in the controller's log
            )
        except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
            raise WorkerError(
                f"the Ray cluster at {address} cannot be joined: {error}",
                hint="its token must be known here: RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH; "
                "a process that was in another cluster before keeps the token of that one",
            ) from error


@contextmanager
def _own_settings() -> Iterator[None]:
    """Settings of a cluster that is started for this process: its files and its token are closed to other users.

    It reports nothing to Ray's makers, unless its user wants it to.
    """
    # Ray opens its own folder to everyone, with the output of workers in it: it goes into one that is closed.
    own = {"RAY_TMPDIR": tempfile.mkdtemp(prefix="fbray", dir=os.environ.get("RAY_TMPDIR"))}
    own["RAY_USAGE_STATS_ENABLED"] = os.environ.get("RAY_USAGE_STATS_ENABLED", "0")
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys():
        own["RAY_AUTH_TOKEN"] = _TOKEN
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
