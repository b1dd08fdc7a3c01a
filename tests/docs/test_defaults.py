"""Five services that are started by hand, without a flag that names an address."""

import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from rollmesh.client import Client, MeshAddresses
from rollmesh.collector.config import CollectorConfig
from rollmesh.gateway.config import GatewayConfig
from rollmesh.router.config import RouterConfig
from rollmesh.sidecar.config import SidecarConfig
from tests.processes import running_by_default

PORTS = {
    "router": RouterConfig.port,
    "collector": CollectorConfig.port,
    "gateway": GatewayConfig.port,
    "sidecar": SidecarConfig.port,
}


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


async def test_they_find_each_other(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if taken := [port for port in PORTS.values() if not is_free(port)]:
        pytest.skip(f"ports {taken} are taken on this machine")
    monkeypatch.chdir(tmp_path)  # where var/ is
    (tmp_path / "var").mkdir()
    (tmp_path / "var" / "model").symlink_to(tokenizer_dir)
    scripted: dict[str, Any] = {"backend": "scripted", "vocabulary_tokens": 500, "reply_tokens": 4}
    async with AsyncExitStack() as stack:
        for service in ("router", "collector", "engine", "gateway", "sidecar"):
            flags = scripted if service == "engine" else {}
            await stack.enter_async_context(running_by_default(service, tmp_path, **flags))
        addresses = MeshAddresses(**{name: f"127.0.0.1:{port}" for name, port in PORTS.items()})
        async with Client(addresses) as client, client.session() as session:
            openai = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
            async with openai:
                answer = await openai.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "hello"}]
                )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
