"""The TransferQueue side of the delivery benchmark. Runs in the trainers' environment.

    .venv-trainers/bin/python -m benchmarks.delivery.queue

Reads plans from standard input, one JSON object per line, and answers each with one line.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transfer_queue as tq
from tensordict import TensorDict

from benchmarks.delivery.rows import Shape, sessions
from benchmarks.harness.memory import peak_mb
from rollmesh.batches import Rows, ragged, rows_of, to_torch
from rollmesh.client import SessionResult
from rollmesh.integrations.verl import stacked, token_columns
from tests.trainers.transfer_queue_server import running_queue

_PARTITION = "train"
_PER_TOKEN = (
    "token_ids",
    "position_ids",
    "loss_mask",
    "logprobs",
    "policy_versions",
    "rewards",
)
Columns = Callable[[Rows], TensorDict]


def trainer_columns(rows: Rows) -> TensorDict:
    """Returns the columns of our own trainer: the same tensors under the same names."""
    tensors = to_torch(ragged(rows))
    return TensorDict({name: tensors[name] for name in _PER_TOKEN}, batch_size=[len(rows)])


def verl_columns(rows: Rows) -> TensorDict:
    """Returns the columns that verl trains on."""
    return stacked([token_columns(row) for row in rows])


async def run(plan: dict[str, Any]) -> dict[str, Any]:
    """Puts and gets batches: first one after the other, then each get alongside the next put."""
    made: Columns = verl_columns if plan["columns"] == "verl" else trainer_columns
    shape = Shape(**plan["shape"])
    records = [SessionResult.from_proto(one) for one in sessions(shape, plan["prefix"])]
    starts = range(0, shape.rows, plan["batch"])
    batches = [made(rows_of(records[at : at + plan["batch"]])) for at in starts]
    keys = [[f"{plan['prefix']}-{at}-{n}" for n in range(len(b))] for at, b in enumerate(batches)]
    began = time.monotonic()
    for names, columns in zip(keys, batches, strict=True):
        await _put(names, columns)
        await _get(names)
    alone_s = time.monotonic() - began
    await _clear(keys)
    began = time.monotonic()
    await _put(keys[0], batches[0])
    for at, names in enumerate(keys):
        async with asyncio.TaskGroup() as group:
            group.create_task(_get(names))
            if at + 1 < len(keys):
                group.create_task(_put(keys[at + 1], batches[at + 1]))
    overlapped_s = time.monotonic() - began
    await _clear(keys)
    return {
        "rows_per_second": shape.rows / alone_s,
        "overlapped_rows_per_second": shape.rows / overlapped_s,
        "peak_mb": _peaks(),
    }


async def _put(keys: list[str], columns: TensorDict) -> None:
    tags = [{"status": "success"}] * len(keys)
    await tq.async_kv_batch_put(keys=keys, partition_id=_PARTITION, fields=columns, tags=tags)


async def _get(keys: list[str]) -> None:
    found = await tq.async_kv_batch_get(keys=keys, partition_id=_PARTITION)
    if len(found) != len(keys):
        raise RuntimeError(f"the queue gave {len(found)} of {len(keys)} rows")


async def _clear(keys: list[list[str]]) -> None:
    for names in keys:
        await tq.async_kv_clear(keys=names, partition_id=_PARTITION)


def _peaks() -> dict[str, float]:
    """Returns the peak memory of this process and of the queue's actors, by name."""
    found = {"client": peak_mb("self")}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if path.stat().st_uid != os.getuid():
                continue
            title = (path / "cmdline").read_bytes().decode(errors="replace")
            if title.startswith("ray::") and ("Storage" in title or "Controller" in title):
                name = title.removeprefix("ray::").partition("\0")[0].partition(".")[0].lower()
                found[name] = max(found.get(name, 0.0), peak_mb(int(path.name)))
        except (OSError, IndexError):  # the process has ended
            continue
    return found


def main() -> None:
    """Runs plans until standard input ends."""
    with running_queue():
        print("STARTED", flush=True)
        for line in sys.stdin:
            print("DONE", json.dumps(asyncio.run(run(json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
