"""A few warm processes that decode images, each of which is killed when it takes too long.

A decoder may crash, or take CPU time that no header tells: that is the image's fault. A decoder
that is killed from outside, or gets too little of a busy machine, says nothing about its image.
Owners take turns, and an owner that leaves frees its process, so one session's images hold up no
other session for longer than one image.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from PIL import Image

from rollmesh.runtime.bounded import FairSlots
from rollmesh.runtime.codec.images import ImageLimits, check_size
from rollmesh.runtime.errors import InvalidImageError, OverloadedError, RollmeshError
from rollmesh.runtime.process.children import Child, start_child

_WORKERS = 2
_CPU_S = 10.0
_WALL_S = 60.0  # with the start of a process. Only a busy machine takes as long
_RETRY_MS = 2000
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, -signal.SIGHUP)
"""Exit codes of a process that was ended by others."""


class DecodedImage(NamedTuple):
    """An image that can be decoded."""

    media_type: str
    """Media type that the bytes have."""
    width: int
    """Pixels."""
    height: int
    """Pixels."""
    pixels: Image.Image | None
    """The pixels as RGB, if they were wanted."""


class ImageDecoders:
    """Owns the processes. Each starts with the first image that needs it."""

    def __init__(self, limits: ImageLimits, cpu_s: float = _CPU_S, wall_s: float = _WALL_S) -> None:
        """Takes the limits on one image, and on the CPU time and the time to decode it, seconds."""
        self._limits = limits
        self._cpu_s = cpu_s
        self._wall_s = wall_s
        self._slots = FairSlots(_WORKERS)
        self._idle: list[Child] = []
        self._killed: list[Child] = []

    async def decode(
        self,
        data: bytes,
        field: str,
        owner: str,
        *,
        pixels: bool = False,
        known: Callable[[], DecodedImage | None] = lambda: None,
    ) -> DecodedImage:
        """Returns an image after decoding it.

        Args:
            data: The bytes of the file.
            field: Names the image in errors.
            owner: Owner of the image. Owners take turns.
            pixels: Whether to return the pixels.
            known: Returns the image if it was decoded while this call waited for its turn.

        Raises:
            InvalidImageError: It is no image that is served, is broken or too large, or takes too
                much CPU time to decode.
            OverloadedError: The machine killed the decoder, or was too busy for it.
        """
        check_size(data, field, self._limits)
        async with self._slots.slot(owner):
            if (found := known()) is not None:
                return found
            limits = self._limits
            child = self._ready() or await start_child(
                *(sys.executable, "-m", "rollmesh.runtime.decoding_worker"),
                *map(str, (limits.max_bytes, limits.max_pixels, self._cpu_s)),
            )
            answer: DecodedImage | InvalidImageError | None = None
            try:
                async with asyncio.timeout(self._wall_s):
                    answer = await self._ask(child, data, field, pixels=pixels)
            except TimeoutError as error:
                raise _busy(f"{field}: was not decoded within {self._wall_s:g} s") from error
            finally:
                if answer is None:
                    self._kill(child)
                else:
                    self._idle.append(child)
        if isinstance(answer, InvalidImageError):
            raise answer
        assert answer is not None  # the time limit raises
        return answer

    async def close(self) -> None:
        """Ends the processes."""
        while self._idle:
            self._kill(self._idle.pop())
        for child in self._killed:
            await child.wait()
        self._killed.clear()

    def _ready(self) -> Child | None:
        while self._idle:
            if (child := self._idle.pop()).exit_code is None:
                return child
            self._kill(child)
        return None

    def _kill(self, child: Child) -> None:
        """Kills a process. It is waited for later, because the caller may be cancelled."""
        child.kill()
        self._killed = [one for one in (*self._killed, child) if not _is_over(one)]

    async def _ask(
        self, child: Child, data: bytes, field: str, *, pixels: bool
    ) -> DecodedImage | InvalidImageError:
        head = json.dumps({"size": len(data), "pixels": pixels}).encode() + b"\n"
        try:
            await child.send(head + data)
            answer: dict[str, Any] = json.loads(await child.stdout.readline())  # empty at its end
            if "problem" in answer:
                return InvalidImageError(field, answer["problem"])
            size = answer["width"], answer["height"]
            shown = None
            if pixels:
                read = await child.stdout.readexactly(size[0] * size[1] * 3)
                shown = Image.frombytes("RGB", size, read)
            return DecodedImage(answer["type"], *size, shown)
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise self._failure(await child.wait(), field) from error

    def _failure(self, code: int, field: str) -> RollmeshError:
        """Returns why a process ended instead of answering."""
        if code >= 0:
            return RollmeshError("the process that decodes images failed; see the log")
        if code in _FROM_OUTSIDE:
            return _busy(
                f"{field}: its decoder was killed, as the kernel does when memory is short"
            )
        if code == -signal.SIGPROF:
            return InvalidImageError(
                field,
                f"takes more than {self._cpu_s:g} s of CPU to decode; send a simpler file, such as "
                "a PNG or a JPEG that is not progressive",
            )
        return InvalidImageError(
            field, "ends the process that decodes it; send another file of the image"
        )


def _busy(problem: str) -> OverloadedError:
    return OverloadedError(f"{problem}; try again", retry_delay_ms=_RETRY_MS)


def _is_over(child: Child) -> bool:
    """Returns whether a killed process has ended, and then closes its socket."""
    if child.exit_code is None:
        return False
    child.stdin.close()
    return True
