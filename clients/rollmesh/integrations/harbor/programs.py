"""Programs beside a runner of Harbor's agents: one runs a trial, and one cancels left jobs.

`runner` runs this file in Harbor's own environment, of Python 3.12 or newer. The standard input has
a line with Harbor's `TrialConfig`. Its end cancels the trial, so that the sandbox of a runner that
has died ends. Harbor writes the result to the trial's folder.

`rollmesh.client.reaper` calls `end` once a runner's process has died. That needs only the standard
library.
"""

import asyncio
import json
import sys
import time
from contextlib import closing
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

_MOST_BYTES = 16 * 1024 * 1024
_LIMIT_S = 600.0
_PAUSE_S = 1.0
_ANSWER_S = 10.0
_JOBS = "SELECT id FROM job WHERE name = ?"


def end(left: set[str]) -> None:
    """Cancels jobs. A job that the server does not have yet, or cannot cancel now, is tried again.

    Args:
        left: For each job a JSON object with `server`, `key` and `name`.
    """
    deadline = time.monotonic() + _LIMIT_S
    while left and time.monotonic() < deadline:
        left = {job for job in left if not _is_cancelled(**json.loads(job))}
        time.sleep(_PAUSE_S if left else 0)


def _is_cancelled(server: str, key: str, name: str) -> bool:
    try:
        (found,) = _post(f"{server}/query", key, [[_JOBS, name]])["results"]
        for job in found["rows"]:
            _post(f"{server}/jobs/{job['id']}/cancel", key, {})
        return bool(found["rows"])
    except (OSError, HTTPException, ValueError, KeyError):
        return False


def _post(address: str, key: str, body: object) -> Any:
    url = urlsplit(address)
    kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    with closing(kind(url.netloc, timeout=_ANSWER_S)) as connection:
        connection.request("POST", url.path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise HTTPException(response.status)
        return json.load(response)


async def main() -> None:
    """Runs a trial."""
    from harbor.models.trial.config import TrialConfig
    from harbor.trial.trial import Trial

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
