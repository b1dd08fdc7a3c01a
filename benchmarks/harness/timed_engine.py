"""The engine with a scripted backend that reports when each answer's first token left the model.

It is the engine of `python -m rollmesh.engine`, including its flags. The benchmark wraps the
backend from outside, so the product needs no hook. For each answer it prints `FIRST <ns>` on the
monotonic clock, which all processes of a machine share.
"""

import os
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from rollmesh.engine import EngineConfig, EngineService, GenerateInput, ScriptedBackend
from rollmesh.runtime.process import run_service
from rollmesh.v1 import engine_pb2

_generate = ScriptedBackend.generate


async def _timed(
    self: ScriptedBackend, request: GenerateInput
) -> AsyncGenerator[engine_pb2.TokenChunk, None]:
    first = True
    async with aclosing(_generate(self, request)) as messages:
        async for message in messages:
            if first:
                first = False
                print("FIRST", time.monotonic_ns(), flush=True)
            yield message


if __name__ == "__main__":
    ScriptedBackend.generate = _timed  # type: ignore[method-assign]
    sys.exit(run_service("engine", EngineConfig, EngineService, sys.argv[1:], os.environ))
