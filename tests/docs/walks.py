"""One process with all five services, and which of our functions run in which order."""

import asyncio
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rollmesh.client import Client, MeshAddresses
from rollmesh.sidecar import SidecarConfig
from tests.gateway.live import LiveMesh
from tests.sidecar.scripted_gateway import sidecar_of


class Tracer:
    """Notes the calls of our functions in their order, in all threads that begin later."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        """Module and qualified name."""
        self._noting = False
        self._awaited: tuple[tuple[str, str], Callable[[], object]] | None = None

    @contextmanager
    def awaiting(self, function: tuple[str, str]) -> Iterator[asyncio.Event]:
        """Yields an event that is set when a function is called."""
        seen = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._awaited = (function, lambda: loop.call_soon_threadsafe(seen.set))
        try:
            yield seen
        finally:
            self._awaited = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    @contextmanager
    def noting(self) -> Iterator[None]:
        self.calls = []
        self._noting = True
        try:
            yield
        finally:
            self._noting = False

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if self._noting and event == "call":
            module = frame.f_globals.get("__name__", "")
            if module.startswith("rollmesh."):
                call = (module, frame.f_code.co_qualname)
                self.calls.append(call)
                if self._awaited is not None and self._awaited[0] == call:
                    self._awaited[1]()


@asynccontextmanager
async def one_process(folder: Path, model: Path) -> AsyncIterator[Client]:
    """Runs router, collector, engines, gateway and sidecar on this loop. Yields a client."""
    async with LiveMesh(folder, model, random.Random(0), faults=0) as mesh:
        async with sidecar_of(SidecarConfig(gateway=mesh.address)) as sidecar:
            addresses = MeshAddresses(
                router=mesh.router,
                gateway=mesh.address,
                collector=mesh.collector,
                sidecar=sidecar.removeprefix("http://"),
            )
            async with Client(addresses) as client:
                yield client
