"""The first process of an environment without a container: gives its namespaces a root directory of their own.

``unshare --mount --pid --fork python -I -S harbor_namespace.py ROOT NAME...`` prints the process id to enter, and ends
with its standard input, however that is closed. The kernel then kills all processes of the namespace and removes its
mounts. ROOT becomes ``/``. Of ``/``, what is called ``NAME...`` is ROOT's. All else is the machine's, read-only.
"""

import ctypes
import os
import signal
import sys

MS_BIND_ALL = 0x1000 | 0x4000
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY = 1
SYS_MOUNT_SETATTR = 442  # on every architecture
libc = ctypes.CDLL(None, use_errno=True)


def main(root: str, own: list[str]) -> None:
    """Make ``root`` the root directory, and wait for the end of the standard input. Raises ``OSError``."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps orphans, whose parent this process becomes
    pid = os.readlink("/proc/self")  # as the machine numbers it: this is still its /proc
    _call("mount", root.encode(), root.encode(), None, MS_BIND_ALL, None)
    for entry in os.scandir("/"):
        if entry.name not in own:
            _show(entry, f"{root}/{entry.name}")
    _call("mount", b"proc", f"{root}/proc".encode(), b"proc", 0, None)
    os.chdir(root)
    _call("pivot_root", b".", b".")
    _call("umount2", b".", MNT_DETACH)
    os.chdir("/")
    os.write(1, f"{pid}\n".encode())
    sys.stdin.read()


def _show(entry: "os.DirEntry[str]", target: str) -> None:
    if entry.is_symlink():
        os.symlink(os.readlink(entry.path), target)
        return
    if entry.is_dir():
        os.mkdir(target)
    else:
        open(target, "w").close()
    if entry.name == "proc":  # the namespace has its own
        return
    _call("mount", entry.path.encode(), target.encode(), None, MS_BIND_ALL, None)
    if entry.name != "dev":
        attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY)
        size = ctypes.c_size_t(ctypes.sizeof(attributes))
        _call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, attributes, size)


def _call(name: str, *arguments: object) -> None:
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
