"""Checks whether a run can have the workers that its start asks for."""

from collections.abc import Sequence
from importlib.util import find_spec

from forebay.core.addresses import is_own_host
from forebay.core.errors import InvalidInput
from forebay.core.run import RunSettings
from forebay.core.settings import Settings
from forebay.generators.discovery.info import GeneratorInfo
from forebay.workers.rollouts.other_nodes import check_address_of

LOCAL_CLUSTERS = ("auto", "local")
"""Ray addresses that name no machine; the run process finds the nodes of a cluster."""
ALL_INTERFACES = ("0.0.0.0", "::")  # noqa: S104 - recognised here, not bound
"""A server that listens there gives run processes a loopback address, unless it has a ``public_url``."""


def check_workers(run: RunSettings, engine_urls: Sequence[str], generator: GeneratorInfo, settings: Settings) -> None:
    """Raise ``InvalidInput`` if the run cannot have its workers."""
    if run.workers is None:
        if run.backend is not None:
            raise InvalidInput(
                f"backend {run.backend!r} does nothing without workers",
                hint="give their number: forebay start --workers 4, or workers in the body",
                field="backend",
            )
        return
    if sum(run.workers) > settings.max_workers:
        raise InvalidInput(
            f"workers must be at most {settings.max_workers} in total (got {sum(run.workers)})",
            hint="ask for fewer, or raise the server's setting max_workers",
            field="workers",
        )
    if not generator.imports_base:
        raise InvalidInput(
            f"workers cannot run the rollouts of {generator.path.name}, which starts them itself",
            hint="leave it out, or let the generator use forebay.generators.base.BaseGenerator",
            field="workers",
        )
    if run.backend == "ray":
        _check_ray(engine_urls, settings)


def _check_ray(engine_urls: Sequence[str], settings: Settings) -> None:
    if find_spec("ray") is None:
        raise InvalidInput("backend 'ray': Ray is not installed", hint="pip install 'forebay[ray]'", field="backend")
    address = settings.ray_address
    if not address:
        raise InvalidInput(
            "backend 'ray': this server has no Ray cluster",
            hint="set ray_address on the server: HOST:PORT of the head node, or auto",
            field="backend",
        )
    if address not in LOCAL_CLUSTERS and not is_own_host(address.rpartition(":")[0].strip("[]")):
        check_address_of("public_url", settings.public_url or _own_url(settings))
        for url in engine_urls:
            check_address_of("remote_engine_url", url)


def _own_url(settings: Settings) -> str:
    host = "127.0.0.1" if settings.host in ALL_INTERFACES else settings.host
    return f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"
