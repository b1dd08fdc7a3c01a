"""Sessions without a reward, and named pipes through which a scorer says that it began."""

import asyncio
import os
from pathlib import Path
from typing import TextIO

from rollmesh.v1 import session_pb2
from tests.collector.records import record

FUNCTION = "tests.scorer.functions:behaves"
REWARD = 6.0
"""What the function returns when it behaves well."""


def unscored(session_id: str, behave: str = "well", **metadata: str) -> session_pb2.SessionRecord:
    made = record(session_id)
    made.ClearField("reward")
    made.metadata["behave"] = behave
    made.metadata.update(metadata)
    return made


class Hanging:
    """A session whose first scoring hangs, with a child process."""

    def __init__(self, folder: Path, session_id: str = "hangs") -> None:
        self._path = folder / f"{session_id}.pipe"
        os.mkfifo(self._path)
        self.session = unscored(session_id, "hang-once", pipe=str(self._path))
        self._pipe: TextIO | None = None

    async def begun(self) -> None:
        """Returns once the function hangs."""

        def read() -> TextIO:
            pipe = self._path.open()
            assert pipe.readline() == "began\n"
            return pipe

        async with asyncio.timeout(60):
            self._pipe = await asyncio.to_thread(read)

    async def ended(self) -> None:
        """Returns once the worker and its child are gone."""
        assert self._pipe is not None
        with self._pipe:
            async with asyncio.timeout(60):
                assert await asyncio.to_thread(self._pipe.read) == ""
