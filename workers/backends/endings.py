"""Describes how a child process ended."""

import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def ending_of(returncode: int, oom_kills: Mapping[str, int]) -> str:
    """Describe an exit status or a signal. ``oom_kills`` are the counts when the process started."""
    if returncode >= 0:
        return f"its process ended with exit status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:  # a real-time signal
        name = f"signal {-returncode}"
    said = f"its process was killed by {name}"
    if returncode == -signal.SIGKILL and any(now > oom_kills.get(file, now) for file, now in count_oom_kills().items()):
        said += ": the kernel killed a process for lack of memory in the meantime"
    return said


def count_oom_kills() -> dict[str, int]:
    """Processes that the kernel killed for lack of memory, by the file with the count (of the cgroup or machine)."""
    counts: dict[str, int] = {}
    for file in _own_events():
        with suppress(OSError, ValueError):
            for line in file.read_text().splitlines():
                name, _, number = line.partition(" ")
                if name == "oom_kill":
                    counts[str(file)] = int(number)
        if counts:
            break
    return counts


def _own_events() -> list[Path]:
    files = [_CGROUPS / "memory.events", _CGROUPS / "memory" / "memory.oom_control", Path("/proc/vmstat")]
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                files.insert(0, _CGROUPS / path.lstrip("/") / "memory.events")
            elif "memory" in controllers.split(","):
                files.insert(0, _CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return files
