"""A real MLflow server takes traces as they come, and shows them as those of chats and agents."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.mesh.test_traces import TOOLS, ask, traced
from tests.meshes import Mesh, delivered
from tests.paths import ROOT
from tests.processes import reserved_port, run_to_end
from tests.waiting import until

READERS = ROOT / ".venv-readers" / "bin"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not READERS.exists(), reason="needs `make .venv-readers/.ready`"),
]
READ = """
import json, sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
traces = mlflow.search_traces(locations=["0"], return_type="list", max_results=100)
print(json.dumps([
    {
        "tokens": trace.info.token_usage,
        "metadata": trace.info.trace_metadata,
        "spans": [
            {"type": one.span_type, "name": one.name, "status": str(one.status.status_code),
             "inputs": one.inputs, "outputs": one.outputs,
             "tools": one.attributes.get("mlflow.chat.tools")}
            for one in trace.data.spans
        ],
    }
    for trace in traces
]))
"""


@asynccontextmanager
async def mlflow_server(folder: Path) -> AsyncIterator[str]:
    """Yields the URL of a server with its files in a folder."""
    with reserved_port() as holder:
        port = holder.getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *(READERS / "mlflow", "server", "--port", str(port), "--workers", "1"),
            *("--backend-store-uri", f"sqlite:///{folder / 'mlflow.sqlite'}"),
            *("--default-artifact-root", str(folder)),
            cwd=folder,
            env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"},
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"

        async def is_up() -> bool:
            try:
                async with httpx2.AsyncClient() as client:
                    return (await client.get(f"{url}/health", timeout=5)).status_code == 200
            except httpx2.HTTPError:
                return False

        try:
            await until(is_up)
            yield url
        finally:
            os.killpg(process.pid, 15)
            await process.wait()


async def talk(mesh: Mesh) -> str:
    """Two turns with a tool call in one session. Returns its id."""
    async with mesh.client() as client:
        async with client.session(run_id="r") as session:
            agent = mesh.openai(session)
            messages: list[Any] = [{"role": "user", "content": "plain"}]
            said = await ask(agent, messages, stream=False)
            messages += [
                said.model_dump(exclude_none=True),
                {"role": "tool", "content": "3", "tool_call_id": said.tool_calls[0].id},
            ]
            await ask(agent, messages, stream=True)
            session.reward = 1.0
        await delivered(client, session)
    return session.session_id


async def test_mlflow_shows_turns_as_chats_and_sessions_as_agents(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    headers = tmp_path / "headers"
    headers.write_text("x-mlflow-experiment-id: 0\n")
    headers.chmod(0o600)
    async with mlflow_server(tmp_path) as url:
        settings: dict[str, Any] = {"content": True, "headers_file": headers}
        async with traced(tmp_path / "mesh", tokenizer_dir, url, **settings) as mesh:
            session_id = await talk(mesh)

            async def read() -> Any:
                command = (READERS / "python", "-c", READ, url)
                out, _ = await run_to_end(*command, cwd=tmp_path, env=None, limit_s=100)
                found = json.loads(out)
                types = [span["type"] for trace in found for span in trace["spans"]]
                is_complete = types.count("CHAT_MODEL") == 2 and "AGENT" in types
                return found if is_complete and len(types) == 10 else None

            traces = await until(read)
    by_type: dict[str, list[Any]] = {}
    for trace in traces:
        for span in trace["spans"]:
            assert "ERROR" not in span["status"]
            by_type.setdefault(span["type"], []).append((trace, span))
    chats = sorted(by_type["CHAT_MODEL"], key=lambda one: len(one[1]["inputs"]))
    (first, one), (_, two) = chats
    assert len(first["spans"]) == 4
    assert first["tokens"]["input_tokens"] > first["tokens"]["output_tokens"] > 0
    assert one["inputs"] == [{"role": "user", "parts": [{"type": "text", "content": "plain"}]}]
    assert one["outputs"][0]["parts"][1]["name"] == "add"
    assert [message["role"] for message in two["inputs"]] == ["user", "assistant", "tool"]
    assert two["outputs"][0]["parts"] == [{"type": "text", "content": "It is 3."}]
    assert one["tools"] == [{"type": "function", **TOOLS[0]["function"]}]
    (agent,) = by_type["AGENT"]
    # Its list of sessions has all of them.
    assert {one["metadata"]["mlflow.trace.session"] for one in traces} == {session_id}
    assert [span["name"] for span in agent[0]["spans"]] == ["invoke_agent", "ingest"]
