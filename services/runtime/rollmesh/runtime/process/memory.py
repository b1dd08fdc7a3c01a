"""What the C library's allocator does with the memory of a process."""

import asyncio
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_KEPT_BYTES = 64 * 1024 * 1024
_MAPPED_BYTES = 16 * 1024 * 1024
_LARGE_BYTES = 4 * 1024 * 1024
_PAUSE_S = 5.0


def keep_freed_memory() -> None:
    """Lets malloc keep up to 64 MiB of what is freed at the end of a heap, for the next message.

    By itself it gives memory back as soon as a few messages of megabytes are gone, and the kernel
    clears every page of the next ones: for a row of 64k tokens that is a quarter of what the
    gateway's outbox and the collector cost. Where the C library is not glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)


class FreedMemory:
    """Gives back to the kernel what large requests leave behind.

    JSON takes up to 30 times its bytes as Python objects, and malloc keeps the pages of small ones
    once they are freed: three requests of 26 MB left 650 MB. Giving back takes some tens of
    milliseconds, so it is done in a thread, and once for all large requests of five seconds.
    """

    def __init__(self) -> None:
        """Begins without a large request."""
        self._timer: asyncio.TimerHandle | None = None

    def served(self, request_bytes: int) -> None:
        """Notes a request; one of 4 MiB or more has its memory given back soon."""
        if request_bytes >= _LARGE_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._give_back)

    def _give_back(self) -> None:
        self._timer = None
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            asyncio.get_running_loop().run_in_executor(None, trim, 0)
