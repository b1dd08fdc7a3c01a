"""Runs one trial in Harbor's own environment, of Python 3.12 or newer. Run by `runner`.

The standard input has a line with Harbor's `TrialConfig`. Its end cancels the trial, so that the
sandbox of a runner that has died ends. Harbor writes the result to the trial's folder.
"""

import asyncio
import sys

from harbor.models.trial.config import TrialConfig
from harbor.trial.trial import Trial

_MOST_BYTES = 16 * 1024 * 1024


async def main() -> None:
    """Runs the trial."""
    loop, this = asyncio.get_running_loop(), asyncio.current_task()
    assert this is not None
    reader = asyncio.StreamReader(limit=_MOST_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    config = TrialConfig.model_validate_json(await reader.readline())
    ending = loop.create_task(reader.read())
    ending.add_done_callback(lambda _: this.cancel())
    trial = await Trial.create(config)
    await trial.run()


if __name__ == "__main__":
    asyncio.run(main())
