"""Sessions as a log of Inspect, for `inspect view` and `read_eval_log`.

A session is a sample with its main conversation. Its group is the id of the sample, and its seat
the epoch. Inspect has no branches, masks or versions: `metadata["rollmesh"]` counts them.
"""

import json
import shutil
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeAlias

from rollmesh.record.atif import calls_of, leaves_as_result, ordered
from rollmesh.record.rows import Exported
from rollmesh.record.tables import moment
from rollmesh.v1 import sampling_pb2, session_pb2

_Json: TypeAlias = dict[str, Any]
_VERSION = 2
_SHA256 = "sha256:"
_LENGTH = sampling_pb2.FINISH_REASON_LENGTH
_NO_TRACEBACK = {"traceback": "", "traceback_ansi": ""}


async def write_log(sessions: AsyncIterator[session_pb2.SessionRecord], to: Path) -> Exported:
    """Writes a log as JSON, which appears once it is complete.

    Returns:
        The numbers of sessions and samples. A session without messages is no sample.

    Raises:
        OSError: The file cannot be written.
    """
    part = to.with_name(to.name + ".part")
    count, rewards, samples, head, seats = 0, list[float](), 0, _Json(), set[tuple[str, int]]()
    with TemporaryFile("w+", encoding="utf-8", errors="replace", dir=to.parent) as body:
        async for record in sessions:
            count += 1
            if (sample := sample_of(record)) is None:
                continue
            if (key := (sample["id"], sample["epoch"])) in seats:  # Inspect shows one of a key
                sample |= {"id": record.session_id, "epoch": 1}
            seats.add(key)
            if not head:
                created, task = sample["started_at"], record.run_id or "rollmesh"
                spec = {"created": created, "task": task, "dataset": {"name": task}}
                head = {"version": _VERSION, "status": "success", "plan": {}}  # headers need them
                head["eval"] = {**spec, "model": record.model, "config": {}}
                head["stats"] = {"started_at": created}
            body.write((",\n" if samples else "") + json.dumps(sample, ensure_ascii=False))
            samples += 1
            rewards += [record.reward] if record.HasField("reward") else []
        if samples:
            body.seek(0)
            with part.open("w", encoding="utf-8") as file:  # headers are read up to the samples
                mean = {"name": "mean", "value": sum(rewards) / max(len(rewards), 1)}
                score = {"name": "reward", "scorer": "reward", "metrics": {"mean": mean}}
                head["results"] = {
                    "total_samples": samples,
                    "completed_samples": samples,
                    "scores": [score] if rewards else [],
                }
                file.write(f'{json.dumps(head, ensure_ascii=False)[:-1]}, "samples": [\n')
                shutil.copyfileobj(body, file)
                file.write("\n]}\n")
            part.replace(to)
    return Exported(count, samples, count - samples)


def sample_of(record: session_pb2.SessionRecord) -> _Json | None:
    """Returns a session as a sample. None if it has no messages."""
    session = leaves_as_result(record)
    found = ((one, session.conversation(one)) for one in ordered(session))
    main, said = next(((one, said) for one, said in found if said is not None), (None, None))
    if main is None or said is None:
        return None
    messages = [_message(one, session.images) for one in said.messages]
    answers = [at for at, one in enumerate(messages) if one["role"] == "assistant"]
    turns = [one for one in main.path.segments if one.sampled]
    usage = {
        "input_tokens": sum(one.start for one in turns),
        "output_tokens": sum(one.end - one.start for one in turns),
        "total_tokens": sum(one.end for one in turns),
    }
    sample: _Json = {
        "id": session.group_id or session.session_id,
        "epoch": session.sample_index + 1,
        "uuid": session.session_id,
        "input": messages[: answers[0]] if answers else messages,
        "target": "",
        "messages": messages,
        "output": {"model": session.model, "choices": [], "usage": usage},
        "model_usage": {session.model: usage},
        "scores": {} if session.reward is None else {"reward": {"value": session.reward}},
        "started_at": moment(record.opened_unix_ms).isoformat(),
        "completed_at": moment(record.closed_unix_ms).isoformat(),
        "total_time": max(record.closed_unix_ms - record.opened_unix_ms, 0) / 1000,
        "metadata": {
            **session.metadata,
            "rollmesh": {
                "run_id": session.run_id,
                "outcome": session.outcome,
                "purpose": session.purpose,
                "trajectory_id": main.trajectory_id,
                "trajectories": len(session.trajectories),
                "reasons": list(main.reasons),
                "policy_versions": sorted(set(main.policy_versions[main.loss_mask].tolist())),
                "trained_tokens": int(main.loss_mask.sum()),
                "tools": said.tools,
            },
        },
    }
    if answers and turns:
        length = turns[-1].finish_reason == _LENGTH
        last = messages[answers[-1]]
        stop = "max_tokens" if length else "tool_calls" if "tool_calls" in last else "stop"
        sample["output"]["choices"] = [{"message": last, "stop_reason": stop}]
    if session.outcome != "COMPLETED":
        sample["error"] = {"message": session.outcome, **_NO_TRACEBACK}
    return sample


def _message(message: Mapping[str, Any], known: Mapping[str, session_pb2.SessionImage]) -> _Json:
    role = "system" if message["role"] == "developer" else message["role"]
    content = _content(message.get("content"), known)
    if reasoning := message.get("reasoning_content"):
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        content = [{"type": "reasoning", "reasoning": reasoning}, *parts]
    found: _Json = {"role": role, "content": content}
    if role == "tool" and message.get("tool_call_id"):
        found["tool_call_id"] = message["tool_call_id"]
    parts = calls_of(message)
    malformed = parts.get("extra", {}).get("rollmesh", {}).get("malformed_calls", {})
    calls = [
        {
            "id": (id_ := one["tool_call_id"]),
            "type": "function",
            "function": one["function_name"],
            "arguments": one["arguments"],
            "parse_error": f"no object: {malformed[id_]}" if id_ in malformed else None,
        }
        for one in parts.get("tool_calls", ())
    ]
    return found | ({"tool_calls": calls} if calls else {})


def _content(content: Any, known: Mapping[str, session_pb2.SessionImage]) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    return [_part(one, known) for one in content]


def _part(part: Mapping[str, Any], known: Mapping[str, session_pb2.SessionImage]) -> _Json:
    if part.get("type") == "text":
        return {"type": "text", "text": part["text"]}
    url = part.get("image_url", {}).get("url", "")
    image = known.get(url.removeprefix(_SHA256))
    if image is None:
        return {"type": "text", "text": json.dumps(part, ensure_ascii=False)}
    data = b64encode(image.data).decode()
    return {"type": "image", "image": f"data:{image.media_type};base64,{data}"}
