"""The last line of a finished file: a digest of all before it. SQLite looks at no byte behind its pages."""

import os
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

SEAL = b"\nforebay blake2b %b\n"
DIGEST_BYTES = 32
SEAL_BYTES = len(SEAL % (b"0" * 2 * DIGEST_BYTES))
CHUNK_BYTES = 1 << 20
MISSING = "its last line is missing: it is cut off, or something was added to it"
DIFFERS = "its digest differs: some byte of it is not what was written"


def seal(path: Path) -> None:
    """Append the line, and wait for the disk. Raises ``OSError``."""
    with path.open("r+b") as file:
        digest = _digest(file, os.fstat(file.fileno()).st_size)
        file.seek(0, os.SEEK_END)
        file.write(SEAL % digest)
        file.flush()
        os.fsync(file.fileno())


def seal_problem(path: Path) -> str:
    """What is wrong with the last line, or with what it stands for; "" if nothing is. Raises ``OSError``."""
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size - SEAL_BYTES
        if num_bytes < 0:
            return MISSING
        file.seek(num_bytes)
        found = file.read(SEAL_BYTES)
        before, _, after = SEAL.partition(b"%b")
        if not (found.startswith(before) and found.endswith(after)):
            return MISSING
        file.seek(0)
        if SEAL % _digest(file, num_bytes) != found:
            return DIFFERS
    return ""


def _digest(file: BinaryIO, num_bytes: int) -> bytes:
    """Of the file's next bytes, in hex."""
    digest = blake2b(digest_size=DIGEST_BYTES)
    while num_bytes and (piece := file.read(min(num_bytes, CHUNK_BYTES))):
        digest.update(piece)
        num_bytes -= len(piece)
    return digest.hexdigest().encode()
