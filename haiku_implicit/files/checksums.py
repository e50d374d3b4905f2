"""Checksums of tensors, which another thread computes while this one copies or writes the bytes."""

import threading
import zlib
from collections.abc import Callable

import numpy as np

# From this size on, a thread takes less time than a checksum.
_LARGE = 1 << 20


def crc_beside(data: np.ndarray) -> Callable[[], int]:
    """Begins to compute the CRC-32 of bytes `[bytes]` uint8.

    Args:
      data: the bytes, which have to stay as they are.

    Returns:
      A function that waits for the checksum and returns it.
    """
    if data.size < _LARGE:
        found = [zlib.crc32(data.data)]
        return lambda: found[0]
    found = []
    thread = threading.Thread(target=lambda: found.append(zlib.crc32(data.data)))
    thread.start()

    def wait() -> int:
        thread.join()
        return found[0]

    return wait
