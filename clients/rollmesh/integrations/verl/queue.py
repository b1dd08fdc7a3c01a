"""Writes sessions to a TransferQueue with the columns, keys and tags of verl's trainer.

Keys are `{uid}_{session}_{index}` for trajectories and `{uid}` for prompts. The columns are listed
in docs/verl.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
import transfer_queue as tq
from numpy.typing import NDArray
from tensordict import NonTensorStack, TensorDict

from rollmesh.batches import ImageProcessor, Row, Rows
from rollmesh.client import chosen
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import chat_pb2

PromptStatus: TypeAlias = Literal["any_failed", "all_failed"]
"""When a prompt is a "failure": if any of its sessions failed (as in verl), or all of them."""
STATUSES: dict[str, PromptStatus] = {name: name for name in get_args(PromptStatus)}

_TOKEN_COLUMNS = frozenset(
    {
        "prompts",
        "responses",
        "response_mask",
        "loss_mask",
        "input_ids",
        "attention_mask",
        "position_ids",
        "rollout_log_probs",
        "rm_scores",
        "num_turns",
        "multi_modal_inputs",
        "extra_fields",
    }
)
_SAID = frozenset({chat_pb2.ROLE_USER, chat_pb2.ROLE_TOOL})


@dataclass(frozen=True, slots=True)
class QueueRows:
    """The arguments of one put: B keys, rows and tags."""

    keys: list[str]
    fields: TensorDict
    """Batch size [B]. Per-token columns are nested jagged tensors, [B, j]."""
    tags: list[dict[str, Any]]


def queue_rows(
    rows: Rows,
    prompt: Mapping[str, Any],
    *,
    reward_extra_info: Mapping[str, Any] | None = None,
    flat_extra_fields: bool = False,
    processor: ImageProcessor | None = None,
) -> QueueRows:
    """Returns the rows of one session of a prompt.

    The main conversation comes last, because verl scores the last trajectory of a session.

    Args:
        rows: The rows of one session, at least one.
        prompt: The trainer's columns, copied to each row. `uid` and `global_steps` are required.
        reward_extra_info: verl's extra reward info.
        flat_extra_fields: Whether each entry of `extra_fields` is also a column.
        processor: The image processor of a vision model. None for a model of text.

    Raises:
        InvalidFieldError: The uid contains a "_", the prompt has one of our columns, or a row has
            images and there is no processor, or another model's.
    """
    uid, steps = prompt_uid(prompt), int(prompt["global_steps"])
    if taken := _TOKEN_COLUMNS & prompt.keys():
        raise InvalidFieldError("prompt", f"has the columns {sorted(taken)}; rename them")
    ordered = main_last(rows)
    columns: list[dict[str, Any]] = []
    keys: list[str] = []
    tags: list[dict[str, Any]] = []
    for index, row in enumerate(ordered):
        extra = _extra_fields(row, reward_extra_info or {})
        column = {**prompt, **token_columns(row), "session_id": row.session.sample_index}
        column |= {**_vision_columns(row, processor), "extra_fields": extra}
        columns.append(column | extra if flat_extra_fields else column)
        keys.append(f"{uid}_{row.session.sample_index}_{index}")
        prompt_len = row.trajectory.prompt_tokens
        tags.append(
            {
                "status": "success",
                "prompt_len": prompt_len,
                "response_len": len(row) - prompt_len,
                "seq_len": len(row),
                "global_steps": steps,
                "min_global_steps": extra["min_global_steps"],
                "max_global_steps": extra["max_global_steps"],
            }
        )
    return QueueRows(keys, stacked(columns), tags)


def main_last(rows: Rows) -> list[Row]:
    """Returns the rows of a session in the queue's order: as exported, the main one last."""
    return sorted(
        rows, key=lambda row: (row.trajectory.lineage in {"MAIN", "COMPACTION"}, row.index)
    )


def prompt_uid(prompt: Mapping[str, Any]) -> str:
    """Returns the uid of a prompt.

    Raises:
        InvalidFieldError: It contains a "_", which separates the parts of a key.
    """
    uid = str(prompt["uid"])
    if "_" in uid:
        raise InvalidFieldError(
            "uid", f'{uid!r} contains "_", which separates the parts of a key; leave it out'
        )
    return uid


def token_columns(row: Row) -> dict[str, torch.Tensor]:
    """Returns verl's token columns: P prompt tokens, R response tokens from the first sampled one.

    `prompts` int64 [P]. `responses`, `response_mask`, `loss_mask` int64 [R]. `input_ids`,
    `attention_mask`, `position_ids` int64 [P + R]. `rollout_log_probs`, `rm_scores` float32 [R].
    `num_turns` int64 []. With a teacher also its `teacher_ids` int32 [P + R, K] and
    `teacher_logprobs` float32 [P + R, K]: K most likely ids, or the token itself with K = 1. As in
    verl's `compute_teacher_logprobs_single`, a row is about the next token, so the last is empty.
    `routed_experts` int16 [P + R, L, K] if the session recorded them, 0 where a token has no row,
    as in verl's agent loop.
    """
    trajectory = row.trajectory
    prompt = trajectory.prompt_tokens
    ids = _tensor(trajectory.token_ids, np.int64)
    mask = _tensor(trajectory.loss_mask[prompt:], np.int64)
    found = {
        "prompts": ids[:prompt],
        "responses": ids[prompt:],
        "response_mask": mask,
        "loss_mask": mask,
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(len(ids), dtype=torch.int64),
        "rollout_log_probs": _tensor(trajectory.logprobs[prompt:], np.float32),
        "rm_scores": _tensor(row.rewards[prompt:], np.float32),
        "num_turns": torch.tensor(_messages(row), dtype=torch.int64),
    }
    if (experts := trajectory.columns.routed_experts()) is not None:
        found["routed_experts"] = _tensor(experts.rows, np.int16)
    if (scores := trajectory.teacher) is not None:
        top_ids, top_logprobs = scores.top_ids, scores.top_logprobs
        if not top_ids.shape[1]:
            top_ids = trajectory.token_ids[:, None].astype(np.int64)
            top_logprobs = scores.logprobs[:, None]
        of_next = np.zeros(top_ids.shape, np.int32), np.zeros(top_ids.shape, np.float32)
        of_next[0][scores.start - 1 : -1] = top_ids[scores.start :]
        of_next[1][scores.start - 1 : -1] = top_logprobs[scores.start :]
        found["teacher_ids"], found["teacher_logprobs"] = map(torch.from_numpy, of_next)
    return found


def vision_columns(row: Row, processor: ImageProcessor) -> dict[str, Any]:
    """Returns verl's columns of a row of a vision model, as its agent loop makes them.

    `multi_modal_inputs`: the processor's outputs, with `images_seqlens`, the patches of each image,
    if it has grids. Empty without images. `position_ids` int64 [4, P + R] if the model has
    multi-dimensional positions: those of text, then temporal, height and width. Otherwise
    int64 [P + R].
    """
    made = processor.inputs(row)
    inputs = dict(made.tensors)
    if (grid := inputs.get("image_grid_thw")) is not None:
        inputs["images_seqlens"] = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
    positions = torch.from_numpy(made.position_ids)
    if positions.ndim > 1:
        positions = torch.cat((torch.arange(len(row))[None], positions))
    return {"position_ids": positions, "multi_modal_inputs": inputs}


def stacked(columns: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Returns rows with the same columns as a TensorDict of batch size [B].

    Raises:
        InvalidFieldError: A row lacks a column of another one.
    """
    for column in columns:
        if missing := columns[0].keys() ^ column.keys():
            problem = f"only some rows have {sorted(missing)}; open all sessions with the same ones"
            raise InvalidFieldError("columns", problem)
    found: dict[str, Any] = {}
    for name, first in columns[0].items():
        values = [column[name] for column in columns]
        if not isinstance(first, torch.Tensor):
            found[name] = NonTensorStack(*values)
        elif first.ndim == 0:
            found[name] = torch.stack(values)
        else:
            found[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
    return TensorDict(found, batch_size=[len(columns)])


class TransferQueueWriter:
    """Writes to one partition of the queue to which `tq.init` connected this process."""

    def __init__(self, partition: str, status: PromptStatus = "any_failed") -> None:
        """Takes the partition ("train" or "val") and the rule for failed prompts.

        Raises:
            InvalidFieldError: The status is not a `PromptStatus`.
        """
        self._partition = partition
        self._status = chosen("status", status, STATUSES)

    async def begin(self, uid: str) -> None:
        """Marks a prompt as running."""
        await self._tag(uid, "running")

    async def write(self, rows: QueueRows) -> None:
        """Puts the rows of a session into the queue."""
        await tq.async_kv_batch_put(
            keys=rows.keys, partition_id=self._partition, fields=rows.fields, tags=rows.tags
        )

    async def end(self, uid: str, sessions: int, failed: int) -> bool:
        """Marks a prompt as ended. No rows of it may be written afterwards.

        Returns:
            Whether verl trains it. False: it is a failure.
        """
        is_finished = failed <= (0 if self._status == "any_failed" else sessions - 1)
        await self._tag(uid, "finished" if is_finished else "failure")
        return is_finished

    async def _tag(self, uid: str, status: str) -> None:
        await tq.async_kv_put(key=uid, partition_id=self._partition, tag={"status": status})


def _vision_columns(row: Row, processor: ImageProcessor | None) -> dict[str, Any]:
    if processor is not None:
        return vision_columns(row, processor)
    if row.trajectory.images:
        raise InvalidFieldError(
            "model_path",
            f"trajectory {row.trajectory.trajectory_id} has images; name the folder of the model, "
            "whose image processor makes verl's multi_modal_inputs",
        )
    return {"multi_modal_inputs": {}}


def _messages(row: Row) -> int:
    """Counts messages as verl does: each answer, and each run of user or tool messages."""
    count, outside = row.trajectory.turns, False
    for segment in row.trajectory.segments:
        if segment.sampled:
            outside = False
        elif segment.role in _SAID and not outside:
            outside = True
            count += 1
    return count


def _extra_fields(row: Row, reward_extra_info: Mapping[str, Any]) -> dict[str, Any]:
    versions = row.trajectory.policy_versions
    steps = versions[versions >= 0]
    if any(span.adapter for span in row.trajectory.version_spans):
        steps = steps - 1  # an adapter's first version is 1, before verl's first step
    return {
        "reward_extra_info": dict(reward_extra_info),
        "min_global_steps": int(steps.min()),
        "max_global_steps": int(steps.max()),
        "trajectory_id": row.trajectory.trajectory_id,
        "lineage": row.trajectory.lineage,
        "lineage_source": row.trajectory.lineage_source,
        "reasons": list(row.trajectory.reasons),
        "numerics": sorted({span.numerics_id for span in row.trajectory.version_spans}),
    }


def _tensor(array: NDArray[Any], dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(array.astype(dtype))
