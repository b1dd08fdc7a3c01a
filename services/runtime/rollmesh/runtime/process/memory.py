"""Settings of the C library's memory allocator."""

import asyncio
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_KEPT_BYTES = 64 * 1024 * 1024
_MAPPED_BYTES = 16 * 1024 * 1024
_LARGE_BYTES = 4 * 1024 * 1024
_PAUSE_S = 5.0


def keep_freed_memory() -> None:
    """Lets malloc keep up to 64 MiB of freed memory for the next message.

    By default malloc returns memory to the kernel after a few messages of megabytes, and the kernel
    clears every page of the next ones: for a row of 64k tokens, a quarter of the cost of the
    gateway's outbox and the collector. Without glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)


class FreedMemory:
    """Returns the memory of large requests to the kernel.

    Parsed JSON takes up to 30 times its size as Python objects, and malloc keeps the pages of small
    objects after they are freed: three requests of 26 MB left 650 MB. Returning them takes tens of
    milliseconds, so it happens in a thread, once for all large requests within five seconds.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def served(self, request_bytes: int) -> None:
        """Notes a request. After one of 4 MiB or more, memory is returned soon."""
        if request_bytes >= _LARGE_BYTES and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_PAUSE_S, self._give_back)

    def _give_back(self) -> None:
        self._timer = None
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            asyncio.get_running_loop().run_in_executor(None, trim, 0)
