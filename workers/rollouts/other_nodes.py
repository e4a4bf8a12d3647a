"""Workers on other machines: whether they reach what they need, and how they get the code of the run."""

import asyncio
import fcntl
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from forebay.core.addresses import engine_urls, is_local_url, without_login
from forebay.core.errors import InvalidInput
from forebay.generators.process.spec import RunSpec

Address = tuple[str, str]
"""A URL, after the field or setting that says it."""
CONNECT_S = 5.0
_WHAT = {
    "public_url": ("this server", "the server's setting public_url is the address by which they can"),
    "gateway_url": ("the gateway", "the server's setting gateway_url is the address by which they can"),
    "remote_engine_url": ("the engine", "name it by an address that they can reach"),
}
FOLDERS = ("code", "packages")
"""Of the run's folder: the copy, and the names by which its files import each other."""
_PREFIX = "forebay-run-"


class NeededAddresses:
    """What the workers of a run on a cluster need; ``has_others``: some of its nodes are other machines."""

    def __init__(self, payload: dict[str, Any], *, has_others: bool) -> None:
        self._has_others = has_others
        self.addresses: list[Address] = []
        self.need("public_url", str(payload["remote_buffer_url"]).partition("/w/")[0])
        for url in engine_urls(payload):
            self.need("remote_engine_url", url)

    def need(self, field: str, url: str) -> None:
        """One more. Raises ``InvalidInput`` if it is this machine's alone, and there are others."""
        if self._has_others:
            check_address_of(field, url)
        self.addresses.append((field, url))


def check_address_of(field: str, url: str) -> None:
    """Raises ``InvalidInput`` if other machines cannot reach it."""
    if is_local_url(url):
        raise refusal((field, url), "workers on other machines")


def refusal(address: Address, who: str) -> InvalidInput:
    """``who`` cannot reach it."""
    field, url = address
    what, hint = _WHAT[field]
    return InvalidInput(f"{who} cannot reach {what} at {without_login(url)}", hint=hint, field=field)


async def out_of_reach(addresses: Sequence[Address]) -> list[Address]:
    """Those at which nobody takes a connection from here."""
    answers = await asyncio.gather(*(_takes_connection(url) for _, url in addresses))
    return [address for address, answers_us in zip(addresses, answers, strict=True) if not answers_us]


async def _takes_connection(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except OSError:  # a time-out is one, too
        return False
    writer.close()
    return True


def pack_code(spec: RunSpec) -> bytes:
    """What a node needs of the run's folder; links that lead out of it stay links."""
    packed = io.BytesIO()
    run_dir = Path(spec.module_path).parents[1]
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        for name in FOLDERS:
            if (run_dir / name).exists():
                archive.add(run_dir / name, name)
    return packed.getvalue()


def has_code(spec: RunSpec) -> bool:
    """Whether this machine has the run's folder, or shares it."""
    return Path(spec.module_path).exists()


def unpacked(spec: RunSpec, packed: bytes) -> RunSpec:
    """The same run with its code in a folder of this machine; those of processes that are gone are removed."""
    _remove_old()
    run_dir = _own_folder()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        # Our own lead has packed it, links included; the first releases of Python 3.11 know no filters.
        archive.extraction_filter = getattr(tarfile, "tar_filter", lambda member, _: member)
        archive.extractall(run_dir)  # noqa: S202 - see above
    module = Path(spec.module_path)
    return replace(spec, module_path=str(run_dir / module.parent.name / module.name))


def _own_folder() -> Path:
    """One that is locked for as long as this process lives: actors are killed, and clean nothing up."""
    draft = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}"))
    _lock(draft)
    return draft.rename(draft.with_name(draft.name.removeprefix("new-")))


def _remove_old() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            os.close(_lock(folder))
        except OSError:  # somebody else's, or in use
            continue
        shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
