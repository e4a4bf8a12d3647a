"""Two machines for Ray on one: network namespaces with an address each, and a cluster with a token between them."""

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.kit import poll_until

HEAD_PORT = 6379
_NETWORK = 0x40000000
"""``CLONE_NEWNET``, for ``setns``."""
RAY = str(Path(sys.executable).with_name("ray"))


def missing_rights() -> str:
    """Why there can be no network namespaces; empty if there can."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    probe = f"fbprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return ""


class TwoNodes:
    """A head and a second node, each with its own address; whoever is in neither reaches neither."""

    def __init__(self, cpus: Sequence[int] = (2, 2)) -> None:
        self.token = secrets.token_hex(32)
        self.names = [f"fb{os.getpid()}n{number}" for number in range(2)]
        self.ips = ["10.213.7.1", "10.213.7.2"]
        self.address = f"{self.ips[0]}:{HEAD_PORT}"
        self._cpus = cpus
        self.head_only = Path(tempfile.mkdtemp(prefix="fbhead"))
        """A folder of the first node's disk: the second one finds it empty."""
        self._folder = tempfile.mkdtemp(prefix="fbray", dir="/tmp")  # the paths of Ray's sockets have to be short

    def __enter__(self) -> "TwoNodes":
        if reason := missing_rights():
            pytest.skip(reason)
        try:
            self._connect()
            self.start(0)
            self.start(1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number, name in enumerate(self.names):
            with suppress(subprocess.CalledProcessError, FileNotFoundError):
                self.kill(number)
                _ip("netns", "delete", name)
        for folder in (self._folder, self.head_only):
            shutil.rmtree(folder, ignore_errors=True)

    def start(self, number: int, **variables: str) -> None:
        """Start Ray on a node; ``variables`` are added to its environment."""
        options = [
            "--num-cpus",
            str(self._cpus[number]),
            "--node-ip-address",
            self.ips[number],
            "--disable-usage-stats",
        ]
        if number == 0:
            options += ["--head", f"--port={HEAD_PORT}", "--include-dashboard=false", f"--temp-dir={self._folder}"]
        else:
            options += ["--address", self.address]
        started = subprocess.run(
            self.inside(number, RAY, "start", "--object-store-memory=80000000", *options),
            env=self.environ(**variables),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert started.returncode == 0, started.stdout + started.stderr

    def pids(self, number: int) -> list[int]:
        """All processes of a node."""
        return [int(pid) for pid in _ip("netns", "pids", self.names[number]).split()]

    def kill(self, number: int, but: Callable[[int], bool] = lambda _: False) -> None:
        """Kill every process of a node at once, as if it had lost its power."""

        def kill_all() -> bool:
            pids = [pid for pid in self.pids(number) if not but(pid)]
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        poll_until(kill_all)

    def environ(self, **variables: str) -> dict[str, str]:
        """For a process that may join the cluster."""
        return {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, **variables}

    def inside(self, number: int, *command: str) -> list[str]:
        """The command line that runs a command on a node."""
        # `ip netns exec` gives it a view of its own of what is mounted where.
        mounting = 'mount -t tmpfs none "$0" && mount -t tmpfs none "$1" && shift && exec "$@"'
        hidden = ["sh", "-c", mounting, str(self.head_only), self._folder] if number else []
        return ["ip", "netns", "exec", self.names[number], *hidden, *command]

    @contextmanager
    def entered(self, number: int) -> Iterator[None]:
        """Within this, what this thread connects to and starts, other threads and processes too, is on that node."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self.names[number]}") as node:
            assert libc.setns(node.fileno(), _NETWORK) == 0, os.strerror(ctypes.get_errno())
            try:
                yield
            finally:
                assert libc.setns(before.fileno(), _NETWORK) == 0, os.strerror(ctypes.get_errno())

    def _connect(self) -> None:
        ends = [f"fbv{os.getpid()}{number}" for number in range(2)]
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, ip in zip(self.names, ends, self.ips, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "address", "add", f"{ip}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")


OTHER_VERSION = """
from importlib import metadata
version = metadata.version
metadata.version = lambda name: "0.0.9" if name == "forebay" else version(name)
"""


def other_forebay(folder: Path) -> str:
    """The ``PYTHONPATH`` of a node that has version 0.0.9."""
    # Not by metadata on its path: Ray puts the controller's folders before it, and a checkout has metadata of its own.
    (folder / "sitecustomize.py").write_text(OTHER_VERSION)
    return os.pathsep.join([str(folder), *filter(None, sys.path)])


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True).stdout
