"""Every credential at every route of the sidecar of a locked mesh."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx2
import pytest
import pytest_asyncio

from rollmesh.client import Session
from rollmesh.sidecar import PROTOCOLS, ROUTES, Opens
from tests.locks import INTRUDER, Locks
from tests.meshes import Mesh, scripted_mesh

pytestmark = pytest.mark.asyncio(loop_scope="module")
SAID = [{"role": "user", "content": "hello"}]
BODIES: Mapping[str, object] = {
    "/v1/chat/completions": {"model": "policy", "messages": SAID},
    "/v1/messages": {"model": "policy", "messages": SAID, "max_tokens": 8},
    "/v1/messages/count_tokens": {"model": "policy", "messages": SAID},
    "/v1/responses": {"model": "policy", "input": "hello"},
    "/v1/responses/input_tokens": {"model": "policy", "input": "hello"},
    **{path: {"contents": {"parts": {"text": "hello"}}} for path in PROTOCOLS if "{model" in path},
    "/v1/lineage": {
        "edges": [{"source_request_id": "a", "target_request_id": "b", "type": "continuation"}]
    },
}
WITH_KEY = [name for name, opens in ROUTES.items() if opens is Opens.SESSION_KEY]
OPEN = [name for name, opens in ROUTES.items() if opens is Opens.NOTHING]
Headers = dict[str, str]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path
) -> AsyncIterator[Mesh]:
    folder = tmp_path_factory.mktemp("routes")
    locks = Locks(folder / "locks")
    async with scripted_mesh(folder, tokenizer_dir, locks=locks) as mesh:
        yield mesh


@pytest_asyncio.fixture(loop_scope="module")
async def http(mesh: Mesh) -> AsyncIterator[httpx2.AsyncClient]:
    base = f"http://{mesh.address('sidecar')}"
    async with httpx2.AsyncClient(base_url=base, timeout=60) as client:
        yield client


async def response_of(http: httpx2.AsyncClient, session: Session) -> str:
    """Makes a response that can be asked for."""
    body = BODIES["/v1/responses"]
    found = await http.post("/v1/responses", json=body, headers=bearer(session.api_key))
    assert found.status_code == 200, found.text
    return str(found.json()["id"])


async def knock(
    http: httpx2.AsyncClient, name: str, place: str, headers: Headers, response: str = ""
) -> int:
    """Asks a route with what it takes. Returns the status."""
    method, path = name.split(" ")
    body = BODIES.get(path)
    path = path.replace("{response}", response).replace("{model:path}", "policy")
    asked = f"/sessions/{place}{path}" if place else path
    return (await http.request(method, asked, json=body, headers=headers)).status_code


def bearer(token: str) -> Headers:
    return {"authorization": f"Bearer {token}"}


def refused(
    session: Session, other: Session, tokens: Mapping[str, str]
) -> list[tuple[str, Headers]]:
    """What does not open a session: the session part of the path, and the headers."""
    id_, key, wrong = session.session_id, session.api_key, f"{session.api_key[:-1]}~"
    return [
        ("", {}),
        (id_, {}),
        (wrong, {}),
        (f"{key}x", {}),
        (key, bearer(other.api_key)),
        (other.api_key, bearer(key)),
        (id_, bearer(id_)),
        ("", bearer(id_)),
        ("", bearer(wrong)),
        ("", bearer(f"{key}x")),
        ("", {"x-api-key": wrong}),
        ("", {"authorization": f"Basic {key}"}),
        ("", {"cookie": f"authorization={key}"}),
        (id_, bearer(wrong)),
        (id_, bearer(other.api_key)),
        (id_, {"x-api-key": other.api_key}),
        *(("", bearer(token)) for token in tokens.values()),
        *((id_, bearer(token)) for token in tokens.values()),
        *((token, {}) for token in tokens.values()),
    ]


def opening(session: Session) -> list[tuple[str, Headers]]:
    id_, key = session.session_id, session.api_key
    return [
        ("", bearer(key)),
        ("", {"x-api-key": key}),
        (id_, bearer(key)),
        (id_, {"x-api-key": key}),
        (key, {}),
        (key, bearer(key)),
        (key, bearer("placeholder")),
    ]


async def test_a_route_with_a_key_opens_with_that_key_and_with_nothing_else(
    mesh: Mesh, http: httpx2.AsyncClient
) -> None:
    assert mesh.locks is not None
    roles = ("operator", "trainer", "sidecar", INTRUDER)
    tokens = {role: mesh.locks.token_file(role).read_text().strip() for role in roles}
    wrong: list[str] = []
    async with mesh.client() as client, client.session() as session, client.session() as other:
        response = await response_of(http, session)
        for name in WITH_KEY:
            for place, headers in refused(session, other, tokens):
                status = await knock(http, name, place, headers, response)
                if status != 401:
                    wrong.append(f"{name} at {place!r} with {headers}: {status}")
        for name in WITH_KEY:
            for place, headers in opening(session):
                response = await response_of(http, session)
                status = await knock(http, name, place, headers, response)
                if status != 200:
                    wrong.append(f"{name} at {place!r} with {headers}: {status}")
    assert wrong == []


async def test_an_open_route_answers_every_caller(mesh: Mesh, http: httpx2.AsyncClient) -> None:
    async with mesh.client() as client, client.session() as session:
        for name in OPEN:
            for headers in ({}, bearer(session.api_key), bearer("guessed" * 8)):
                assert await knock(http, name, "", headers) == 200
            text = (await http.get(name.split(" ")[1].replace("{model:path}", "policy"))).text
            assert session.session_id not in text
