"""A session's key opens it and nothing else does. No process writes it down."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from rollmesh.client import Session
from rollmesh.runtime.errors import SessionUnknownError
from tests.meshes import Mesh, scripted_mesh
from tests.processes import ServiceProcess

if TYPE_CHECKING:
    pass

SERVICES = ("router", "engine", "collector", "gateway", "sidecar")
RULES = [("plain", "The answer is 42.")]
ASK: list[Any] = [{"role": "user", "content": "plain"}]


async def shown(process: ServiceProcess) -> str:
    """What a service shows at its metrics endpoint."""
    async with httpx2.AsyncClient() as http:
        return (await http.get(f"http://127.0.0.1:{process.metrics_port}/metrics")).text


async def test_an_agent_that_sets_only_a_base_url_needs_no_other_key(mesh: Mesh) -> None:
    async with mesh.client() as client, client.session() as session, client.session() as other:
        path = "/chat/completions"
        body = {"model": "policy", "messages": ASK}
        async with httpx2.AsyncClient(timeout=60) as http:
            assert (await http.post(session.base_url + path, json=body)).status_code == 200
        for base_url, key, opens in [
            (session.base_url, "static", True),
            (session.base_url, session.api_key, True),
            (session.base_url, other.api_key, False),
            (session.keyless_url, session.api_key, True),
            (session.keyless_url, "static", False),
            (session.keyless_url, other.api_key, False),
            (session.base_url.replace(session.api_key, session.api_key[:-1]), "static", False),
        ]:
            agent = mesh.agent(base_url, key)
            if opens:
                await agent.chat.completions.create(model="policy", messages=ASK)
            else:
                with pytest.raises(openai.AuthenticationError):
                    await agent.chat.completions.create(model="policy", messages=ASK)


async def test_no_key_is_in_anything_that_a_mesh_writes_or_shows(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    """Logs at their lowest level, standard output, metrics, errors, and journals and stores."""

    async def said(session: Session, method: str, path: str, **more: Any) -> str:
        async with httpx2.AsyncClient(timeout=60) as http:
            answer = await http.request(method, f"{session.base_url}{path}", **more)
        return answer.text

    seen: dict[str, Any] = {"log_level": "debug", "metrics_port": 0}
    first: dict[str, dict[str, Any]] = dict.fromkeys(SERVICES, seen)
    async with (
        scripted_mesh(tmp_path, tokenizer_dir, first=first, **seen) as mesh,
        mesh.client() as client,
    ):
        async with client.session(request_id="known-to-the-trainer-only") as session:
            keys = {session.api_key}
            texts = [
                await said(session, "POST", "/chat/completions", json={"messages": ASK}),
                await said(session, "POST", "/chat/completions", content=b"{"),
                await said(session, "POST", "/chat/completions", json={"messages": [{}]}),
                await said(session, "GET", "/unknown"),
                await said(session, "GET", "/models"),
                await said(session, "PUT", "/" + "x" * 9000),
                await said(session, "POST", "/responses", json={"input": "plain"}),
                await said(session, "POST", "/messages", json={"messages": ASK, "max_tokens": 9}),
                await said(session, "GET", f"/responses/{session.api_key}"),
                await said(session, "POST", "/chat/completions",
                           json={"messages": ASK, session.api_key: 1}),
            ]  # fmt: skip
            await client.revoke_key(session)
            keys.add(session.api_key)
            texts.append(await said(session, "POST", "/chat/completions", json={"messages": ASK}))
        texts.append(await said(session, "POST", "/chat/completions", json={"messages": ASK}))
        texts += [await shown(mesh.processes[service]) for service in SERVICES]
        await mesh.processes["gateway"].kill()
        texts.append(await said(session, "POST", "/chat/completions", json={"messages": ASK}))
        with pytest.raises(SessionUnknownError) as unknown:
            await client.stored_session("nobody")
        texts.append(str(unknown.value))
    files = [path for path in mesh.folder.rglob("*") if path.is_file()]
    assert len([path for path in files if path.suffix == ".log"]) >= 5
    written = [path.read_bytes().decode("latin-1") for path in files]
    assert len(keys) == 2
    for key in keys:
        secret = key.split("-", 2)[2]
        assert not [path for path, text in zip(files, written, strict=True) if secret in text]
        assert not [text for text in texts if secret in text]
    logs = [path.read_text() for path in files if path.suffix == ".log"]
    assert not [text for text in logs if "known-to-the-trainer-only" in text]
