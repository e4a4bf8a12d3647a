"""Workers on other machines: checks that they reach the addresses they need, and ships them the code of the run."""

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
"""A field or setting, and the URL that it contains."""
CONNECT_S = 5.0
_WHAT = {
    "public_url": ("this server", "set the server's public_url to an address that they can reach"),
    "gateway_url": ("the gateway", "set the server's gateway_url to an address that they can reach"),
    "remote_engine_url": ("the engine", "give its address on a network that they can reach"),
}
FOLDERS = ("code", "packages")
"""Folders of the run's folder that hold its code: the copy, and the packages by which its files import each other."""
_PREFIX = "forebay-run-"


class NeededAddresses:
    """Addresses that a run's workers on a cluster must reach. ``has_others``: some nodes are other machines."""

    def __init__(self, payload: dict[str, Any], *, has_others: bool) -> None:
        self._has_others = has_others
        self.addresses: list[Address] = []
        self.need("public_url", str(payload["remote_buffer_url"]).partition("/w/")[0])
        for url in engine_urls(payload):
            self.need("remote_engine_url", url)

    def need(self, field: str, url: str) -> None:
        """Add an address. Raises ``InvalidInput`` if only this machine reaches it and there are others."""
        if self._has_others:
            check_address_of(field, url)
        self.addresses.append((field, url))


def check_address_of(field: str, url: str) -> None:
    """Raise ``InvalidInput`` if other machines cannot reach ``url``."""
    if is_local_url(url):
        raise refusal((field, url), "workers on other machines")


def refusal(address: Address, who: str) -> InvalidInput:
    """The error that ``who`` cannot reach this address."""
    field, url = address
    what, hint = _WHAT[field]
    return InvalidInput(f"{who} cannot reach {what} at {without_login(url)}", hint=hint, field=field)


async def out_of_reach(addresses: Sequence[Address]) -> list[Address]:
    """Addresses that accept no connection from this machine."""
    answers = await asyncio.gather(*(_takes_connection(url) for _, url in addresses))
    return [address for address, answers_us in zip(addresses, answers, strict=True) if not answers_us]


async def _takes_connection(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except OSError:  # includes TimeoutError
        return False
    writer.close()
    return True


def pack_code(spec: RunSpec) -> bytes:
    """Pack the parts of the run's folder that a node needs. Links that lead out of it stay links."""
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
    """Unpack the code in a folder of this machine; returns the spec for it. Removes folders of dead processes."""
    _remove_old()
    run_dir = _own_folder()
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        # The lead packed it, links included. The first releases of Python 3.11 have no filters.
        archive.extraction_filter = getattr(tarfile, "tar_filter", lambda member, _: member)
        archive.extractall(run_dir)  # noqa: S202 - see above
    module = Path(spec.module_path)
    return replace(spec, module_path=str(run_dir / module.parent.name / module.name))


def _own_folder() -> Path:
    """A folder locked while this process lives. Actors are killed without cleaning up, so the lock marks live ones."""
    draft = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}"))
    _lock(draft)
    return draft.rename(draft.with_name(draft.name.removeprefix("new-")))


def _remove_old() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        try:
            os.close(_lock(folder))
        except OSError:  # another user's, or in use
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
