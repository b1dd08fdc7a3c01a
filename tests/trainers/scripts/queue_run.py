"""Sessions of every shape through the writer, and what verl's replay buffer makes of them."""

import ast
import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import transfer_queue as tq

from rollmesh.batches import rows_of
from rollmesh.client import Scores, SessionResult
from rollmesh.integrations.verl import (
    PromptStatus,
    Settings,
    TransferQueueWriter,
    load_runner,
    queue_rows,
)
from rollmesh.runtime.codec import Columns, experts_column
from rollmesh.runtime.errors import InvalidFieldError
from tests.batches.records import linear, session, trajectory
from tests.trainers.queues import buffer, described
from tests.trainers.transfer_queue_server import running_queue

_PARTS = [(3, False, False), (4, True, True), (2, False, False), (1, True, True)]


def prompt(uid: str) -> dict[str, Any]:
    return {"uid": uid, "raw_prompt": [{"role": "user", "content": "hi"}], "global_steps": 7}


def branched(index: int, reward: float) -> SessionResult:
    """A main conversation that was exported first, a sub-agent's, and an auxiliary call."""
    return session(
        f"b{index}",
        [
            trajectory(f"main{index}", _PARTS, version=4),
            linear(f"sub{index}", 5, 2, lineage="SUB_AGENT", version=6),
            trajectory(f"title{index}", [(2, False, False), (3, True, False)], lineage="AUXILIARY"),
        ],
        index=index,
        reward=reward,
    )


async def put(
    writer: TransferQueueWriter, uid: str, results: list[SessionResult], failed: int
) -> None:
    await writer.begin(uid)
    for result in results:
        extra = {"accuracy": 1.0}
        rows = queue_rows(rows_of([result]), prompt(uid), reward_extra_info=extra)
        await writer.write(rows)
    await writer.end(uid, len(results) + failed, failed)


def submit(uid: str) -> None:
    tag = {"is_prompt": True, "status": "pending", "global_steps": 7}
    tq.kv_batch_put(keys=[uid], partition_id="train", tags=[tag])


def groups() -> dict[str, Any]:
    """Branched sessions of one group, one group that teaches nothing, and a refill."""
    refilled: list[int] = []

    def refill(count: int) -> int:
        refilled.append(count)
        submit("late")
        equal = [session(f"l{at}", [linear(f"l{at}", 2, 2)], index=at, reward=at) for at in (0, 1)]
        asyncio.run(put(TransferQueueWriter("train"), "late", equal, 0))
        return count

    for uid in ("branched", "equal"):
        submit(uid)
    writer = TransferQueueWriter("train")
    asyncio.run(put(writer, "branched", [branched(0, 1.0), branched(1, 0.0)], 0))
    same = [session(f"e{at}", [linear(f"e{at}", 2, 2)], index=at) for at in (0, 1)]
    asyncio.run(put(writer, "equal", same, 0))
    sampled, metrics = buffer(
        filter_groups_metric="reward",
        refill_fn=refill,
        train_batch_size=2,
        gen_batch_size=1,
        max_inflight_gen_batches=4,
    ).sample(global_steps=7, partition_id="train", batch_size=2)
    data = tq.kv_batch_get(keys=sampled.keys, partition_id="train")
    evicted = metrics["training/filter_groups/evicted_samples"]
    columns = {name: described(data[name])["values"] for name in ("responses", "extra_fields")}
    result = {"keys": list(sampled.keys), "evicted": evicted, "refilled": refilled, **columns}
    tq.kv_clear(partition_id="train", keys=list(sampled.keys))
    return result


def statuses() -> dict[str, str]:
    """How a prompt ends, by policy and by how many of its two sessions failed."""
    found: dict[str, str] = {}
    policies: tuple[PromptStatus, ...] = ("any_failed", "all_failed")
    for policy in policies:
        for failed in range(3):
            uid = f"{policy}-{failed}".replace("_", "-")
            submit(uid)
            ok = [session(f"s{at}", [linear(f"s{at}", 2, 2)], index=at) for at in range(2 - failed)]
            asyncio.run(put(TransferQueueWriter("train", policy), uid, ok, failed))
            found[uid] = tq.kv_list("train")["train"][uid]["status"]
    return found


def experts() -> dict[str, Any]:
    """Routed experts as verl's own agent loop lays them out, and as they come out of the queue."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    rows = np.arange(24, dtype=np.uint8).reshape(4, 3, 2)
    one = replace(linear("moe", 2, 3), columns=Columns((experts_column(0, rows),), 5))
    own = AgentLoopOutput(
        prompt_ids=[1, 2],
        response_ids=[3, 4, 5],
        response_mask=[1, 1, 1],
        routed_experts=rows,
        num_turns=2,
        metrics=AgentLoopMetrics(),
    ).as_dict()["routed_experts"]
    submit("moe")
    asyncio.run(put(TransferQueueWriter("train"), "moe", [session("s", [one])], 0))
    keys = [key for key in tq.kv_list("train")["train"] if key.startswith("moe_")]
    (found,) = tq.kv_batch_get(keys=keys, partition_id="train")["routed_experts"].unbind()
    return {
        "same": bool((found == own).all()) and found.dtype == own.dtype,
        "shape": list(found.shape),
        "last": found[-1].abs().sum().item(),
    }


def refusals() -> dict[str, str]:
    rows = rows_of([session("s", [linear("s", 2, 2)])])
    found: dict[str, str] = {}
    addresses = dict.fromkeys(("router", "gateway", "collector", "sidecar"), "a:1")
    wrongs: dict[str, dict[str, Any]] = {"uid": {"uid": "a_b"}, "column": {"rm_scores": 1}}
    attempts: dict[str, Callable[[], object]] = {
        name: partial(queue_rows, rows, prompt("u") | wrong) for name, wrong in wrongs.items()
    }
    attempts["settings"] = lambda: Settings.from_config({"router": "a:1"})
    attempts["unknown"] = lambda: Settings.from_config({**addresses, "runners": {}, "speed": 1})
    settings: dict[str, Any] = {**addresses, "runners": {}}
    wrong: tuple[tuple[str, Any], ...] = (
        ("status", "some_failed"),
        ("concurrency", 0),
        ("retries", {"tries": 0}),
        ("sampling_policy", "agent"),
    )
    for name, value in wrong:
        attempts[name] = partial(Settings.from_config, {**settings, name: value})
    failed: Any = "some_failed"
    attempts["writer"] = partial(TransferQueueWriter, "train", failed)
    column = experts_column(0, np.ones((4, 3, 2), np.uint8))
    moe = replace(linear("b", 2, 3), columns=Columns((column,), 5))
    mixed = rows_of([session("s", [linear("a", 2, 3), moe])])
    attempts["mixed"] = partial(queue_rows, mixed, prompt("u"))
    attempts["runner"] = lambda: load_runner("mine", "no.such.module:run")
    for name, attempt in attempts.items():
        try:
            attempt()
        except InvalidFieldError as error:
            found[name] = error.message
    return found


def flat() -> list[Any]:
    """Two columns of the extra fields."""
    made = queue_rows(rows_of([branched(0, 1.0)]), prompt("u"), flat_extra_fields=True)
    return [list(made.fields["lineage"]), list(made.fields["max_global_steps"])]


def taught() -> dict[str, Any]:
    """The columns of teachers that name two ids at each position, and none."""
    one = trajectory("t", [(2, False, False), (3, True, True)])
    own, ids = np.array([0, 0, -1, -2, -3], np.float32), np.arange(10).reshape(5, 2)
    wide = Scores(own, ids, (ids / -10).astype(np.float32), start=2, policy_version=1)
    narrow = Scores(own, ids[:, :0], wide.top_logprobs[:, :0], start=2, policy_version=1)
    found: dict[str, Any] = {"token_ids": one.token_ids.tolist()}
    for name, scores in (("wide", wide), ("narrow", narrow)):
        result = session("s", [replace(one, teacher=scores)])
        fields = queue_rows(rows_of([result]), prompt("u")).fields
        columns = {key: fields[key][0] for key in ("teacher_ids", "teacher_logprobs")}
        found[name] = [str(columns["teacher_ids"].dtype)]
        found[name] += [column.tolist() for column in columns.values()]
    return found


def snippet(text: str) -> list[str]:
    """Runs the pages' snippet of the writer. Returns the keys of the rows it wrote."""
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
    before = set(tq.kv_list(partition_id="train")["train"])
    asyncio.run(eval(code, names))  # noqa: S307 - our own pages
    return sorted(set(tq.kv_list(partition_id="train")["train"]) - before)


def main() -> None:
    with running_queue():
        result: dict[str, Any] = {"groups": groups(), "statuses": statuses()}
        result["experts"] = experts()
        result["snippet"] = snippet(json.loads(sys.argv[1])["snippet"])
    result |= {"refusals": refusals(), "flat": flat(), "taught": taught()}
    print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
