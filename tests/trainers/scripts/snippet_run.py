"""Runs the pages' snippet of the TransferQueue writer; prints the keys of the rows it wrote."""

import ast
import asyncio
import json
import sys
from typing import Any

import transfer_queue as tq

from rollmesh.batches import rows_of
from rollmesh.integrations.verl.queue import TransferQueueWriter, queue_rows
from tests.batches.records import linear, session
from tests.trainers.transfer_queue_server import running_queue


def written() -> list[str]:
    text = json.loads(sys.argv[1])["text"]
    names: dict[str, Any] = {
        "TransferQueueWriter": TransferQueueWriter,
        "queue_rows": queue_rows,
        "rows_of": rows_of,
        "session": session("s", [linear("t", 3, 2)], reward=1.0),
        "uid": "u",
        "messages": [{"role": "user", "content": "hi"}],
        "step": 1,
    }
    code = compile(text, "snippet", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with running_queue():
        asyncio.run(eval(code, names))  # noqa: S307 - our own pages
        return [key for key in tq.kv_list(partition_id="train")["train"] if key != "u"]


if __name__ == "__main__":
    print(json.dumps(written()))  # noqa: T201
