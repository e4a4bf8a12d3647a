"""The zstandard frames in which bodies lie in a file."""

import threading
from collections.abc import Callable

from forebay.core.errors import MissingExtra

LEVEL = 3
"""zstd's default: more takes far more time for little."""
MAX_WINDOW_BYTES = 1 << 27
"""Of a frame; more is asked for by none that ``zstd`` makes with its usual levels."""


def compressor() -> Callable[[bytes], bytes]:
    """Makes frames, in one thread at a time. Raises ``MissingExtra`` without zstandard."""
    try:
        import zstandard
    except ImportError:
        raise MissingExtra("zstandard", "zstd") from None
    return zstandard.ZstdCompressor(LEVEL, write_content_size=True).compress


class Frames:
    """What frames hold, for any thread. Raises ``MissingExtra`` without zstandard."""

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError:
            raise MissingExtra("zstandard", "zstd") from None
        self._zstandard = zstandard
        self._decompress = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompress
        # Two threads in one decompressor write over each other's work.
        self._lock = threading.Lock()

    def content(self, frame: bytes, num_bytes: int, *, most: int) -> bytes:
        """The ``num_bytes`` that ``frame`` holds. Raises ``ValueError`` for another length, or one over ``most``."""
        if num_bytes > most:
            raise ValueError(f"it is to hold {num_bytes:,} bytes: more than {most:,} are never written")
        try:
            # Before there is room for it: a frame may name any size.
            if self._zstandard.get_frame_parameters(frame).content_size != num_bytes:
                raise ValueError("it is no frame of this length")
            with self._lock:
                content: bytes = self._decompress(frame, allow_extra_data=False)
        except (self._zstandard.ZstdError, MemoryError) as error:
            raise ValueError(str(error)) from None
        return content
