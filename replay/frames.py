"""The zstandard frames in which a file stores bodies."""

import threading
from collections.abc import Callable

from forebay.core.errors import MissingExtra

LEVEL = 3
"""zstd's default: higher levels take far longer and gain little."""
MAX_WINDOW_BYTES = 1 << 27
"""The largest window that a frame may require; ``zstd`` at its usual levels never needs more."""


def compressor() -> Callable[[bytes], bytes]:
    """A function that compresses into frames, one thread at a time. Raises ``MissingExtra`` without zstandard."""
    try:
        import zstandard
    except ImportError:
        raise MissingExtra("zstandard", "zstd") from None
    return zstandard.ZstdCompressor(LEVEL, write_content_size=True).compress


class Frames:
    """Decompresses frames, from any thread. Raises ``MissingExtra`` without zstandard."""

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError:
            raise MissingExtra("zstandard", "zstd") from None
        self._zstandard = zstandard
        self._decompress = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompress
        # A decompressor is not safe for two threads at once.
        self._lock = threading.Lock()

    def content(self, frame: bytes, num_bytes: int, *, most: int) -> bytes:
        """The ``num_bytes`` in ``frame``. Raises ``ValueError`` for a different length, or one over ``most``."""
        if num_bytes > most:
            raise ValueError(f"it claims {num_bytes:,} bytes: more than {most:,} are never written")
        try:
            # Checked before memory is allocated: a frame may claim any size.
            if self._zstandard.get_frame_parameters(frame).content_size != num_bytes:
                raise ValueError("it is not a frame of this length")
            with self._lock:
                content: bytes = self._decompress(frame, allow_extra_data=False)
        except (self._zstandard.ZstdError, MemoryError) as error:
            raise ValueError(str(error)) from None
        return content
