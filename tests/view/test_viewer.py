import asyncio
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import pytest_asyncio
from starlette.datastructures import URL
from starlette.requests import Request

from rollmesh.client import Client, Rewards, Session, evaluate, start_of_atif
from rollmesh.runtime import label_words, mask_words
from rollmesh.runtime.errors import CallerUnknownError, InvalidFieldError
from rollmesh.view import Index, Viewer, ViewSettings
from tests.locks import Locks
from tests.meshes import Mesh, delivered, scripted_mesh
from tests.processes import run_refused, running
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path
) -> AsyncIterator[Mesh]:
    """A mesh that no test stops."""
    async with scripted_mesh(tmp_path_factory.mktemp("viewed"), tokenizer_dir) as mesh:
        yield mesh


@asynccontextmanager
async def viewer(mesh: Mesh, **flags: object) -> AsyncIterator[httpx2.AsyncClient]:
    given: dict[str, object] = {
        "router": mesh.address("router"),
        "collector": mesh.address("collector"),
    }
    given |= {"tokenizer": mesh.model}
    async with (
        running("view", mesh.folder / "view", **{**given, **flags}) as process,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{process.port}", timeout=60) as http,
    ):
        yield http


async def turn(mesh: Mesh, session: Session, *said: str) -> str:
    """Asks for an answer to messages that alternate between user and assistant."""
    roles = ("user", "assistant") * len(said)
    messages: list[Any] = [
        {"role": role, "content": text} for role, text in zip(roles, said, strict=False)
    ]
    answer = await mesh.openai(session).chat.completions.create(model="policy", messages=messages)
    return answer.choices[0].message.content or ""


async def conversation(mesh: Mesh, client: Client, **settings: Any) -> Session:
    """A closed session of two turns and another answer to the first question."""
    async with client.session(**settings) as session:
        answer = await turn(mesh, session, HOSTILE)
        await turn(mesh, session, HOSTILE, answer, "And then?")
        await turn(mesh, session, "Another question.")
        session.rewards = Rewards(session=0.5)
    return session


async def listed(http: httpx2.AsyncClient, **query: str) -> dict[str, Any]:
    """The page of sessions, once there are any."""

    async def look() -> Any:
        found = (await http.get("/api/sessions", params=query)).json()
        return found if found["total"] else None

    rows: dict[str, Any] = await until(look)
    return rows


@pytest.mark.parametrize("export", ["leaves", "tree"])
async def test_a_session_has_the_tokens_that_the_trainer_gets(shared: Mesh, export: str) -> None:
    async with shared.client() as client, viewer(shared) as http:
        session = await conversation(shared, client, export=export, run_id=export)
        (row,) = (await listed(http, run_id=export))["rows"]
        assert (row["session_id"], row["turns"], row["reward"]) == (session.session_id, 3, 0.5)
        result = await client.stored_session(session.session_id)
        shown = (await http.get(f"/api/session?id={session.session_id}")).json()
        nodes = {one["node_id"]: one for one in shown["nodes"]}
        assert len(shown["paths"]) == 2
        paths = [
            [token for at in one["nodes"] for token in nodes[at]["ids"]] for one in shown["paths"]
        ]
        if result.tree is None:
            assert paths == [one.token_ids.tolist() for one in result.trajectories]
        assert HOSTILE in "".join(one["text"] for one in shown["nodes"])
        sampled = sum(
            end["end"] - end["start"] for one in nodes.values() for end in one["versions"]
        )
        assert sampled == row["sampled"] == row["trained"]
        assert sum(sum(one["mask"]) for one in nodes.values()) == row["trained"]
        for one in (*shown["paths"], *shown["nodes"]):
            rule = {"MAIN": "MAIN_PATH", "ROOT": "OWN_ROOT"}[one["lineage"]]
            assert one["label"] == label_words(one["lineage"], "RULE", rule)
        for one in shown["nodes"]:
            assert one["why"] == mask_words(one["reasons"], one["trained"])
        assert all(value < 0 for one in nodes.values() for value in one["logprobs"] if value)


@pytest.mark.parametrize("export", ["leaves", "tree"])
async def test_numbers_that_a_trainer_wrote_back_belong_to_their_tokens(
    shared: Mesh, export: str
) -> None:
    async with shared.client() as client, viewer(shared) as http:
        session = await conversation(shared, client, export=export, run_id=f"back-{export}")
        await listed(http, run_id=f"back-{export}")
        result = await client.stored_session(session.session_id)
        for part in result.trajectories or [result.tree]:
            assert part is not None
            own = np.where(part.loss_mask, part.logprobs + 0.5, np.nan)
            of = getattr(part, "trajectory_id", "")
            await client.annotate(session.session_id, "logprobs", own, trajectory_id=of)
        with pytest.raises(InvalidFieldError, match="values"):
            await client.annotate(session.session_id, "logprobs", [[1.0]])
        shown = (await http.get(f"/api/session?id={session.session_id}")).json()
        assert shown["annotations"] == ["logprobs"]
        for node in shown["nodes"]:
            for mask, own, sampled in zip(
                node["mask"], node["annotations"]["logprobs"], node["logprobs"], strict=True
            ):
                assert own == (pytest.approx(sampled + 0.5) if mask else None)


async def test_an_evaluation_is_shown_with_its_share_of_passed_tasks(shared: Mesh) -> None:
    async with shared.client() as client, viewer(shared) as http:

        async def attempt(task: str, session: Session) -> float:
            await turn(shared, session, task)
            return float(task == "easy")

        found = await evaluate(client, ["easy", "hard"], runner=attempt, n=2, run_id="judged")

        async def ended() -> Any:
            rows = (await http.get("/api/evaluations")).json()["rows"]
            mine = [one for one in rows if one["run_id"] == "judged"]
            return mine[0] if mine and mine[0]["sessions"] == 4 else None

        row = await until(ended)
        assert row["pass_at"] == {"1": asdict(found.pass_at(1)), "2": asdict(found.pass_at(2))}
        assert (row["tasks"], row["reward"], row["without_result"]) == (2, 0.5, 0)
        assert row["numerics"] == sorted(found.attempts[0].numerics)


async def test_sessions_run_only_view_modules_of_the_operator(shared: Mesh, tmp_path: Path) -> None:
    module = tmp_path / "maze.js"
    module.write_text("export default (session, box) => box.append(session.session_id)")
    async with viewer(shared, view_module=f"maze={module}") as http:
        assert (await http.get("/views/maze.js")).text == module.read_text()
        assert (await http.get("/views/other.js")).status_code == 404
        assert (await http.get("/api/choices")).json()["views"] == ["maze"]
    for wrong in ("maze", "../maze=x.js", f"maze={tmp_path}/none.js"):
        code, errors = await run_refused("view", view_module=wrong)
        assert (code, "view-module" in errors) == (2, True)


async def test_recorded_messages_are_shown_and_searched(shared: Mesh) -> None:
    async with shared.client() as client, viewer(shared) as http:
        session = await conversation(shared, client, run_id="said", record_messages=True)
        await listed(http, run_id="said")
        (row,) = (await listed(http, words="onerror another quest"))["rows"]
        assert row["session_id"] == session.session_id
        shown = (await http.get(f"/api/session?id={session.session_id}")).json()
        said = [one["messages"] for one in shown["nodes"]]
        assert [{"role": "user", "content": HOSTILE}] in said
        assert all(len(one) == 1 for one in said)


async def test_a_reward_that_comes_late_is_shown(shared: Mesh) -> None:
    async with shared.client() as client, viewer(shared) as http:
        async with client.session(run_id="late", reward_timeout_ms=120_000) as session:
            await turn(shared, session, "first")
        assert (await listed(http, run_id="late"))["rows"][0]["reward"] is None
        await client.set_rewards(session.session_id, reward=0.25)

        async def reward() -> bool:
            return bool((await listed(http, run_id="late"))["rows"][0]["reward"] == 0.25)

        await until(reward)


async def test_an_open_session_is_shown_until_it_is_closed(shared: Mesh) -> None:
    step = {"step_id": 1, "source": "user", "message": HOSTILE}
    document = {"schema_version": "ATIF-v1.8", "session_id": "d", "agent": {}, "steps": [step]}
    start = start_of_atif(document)
    async with shared.client() as client, viewer(shared) as http:
        async with client.session(start=start) as session:
            await turn(shared, session, HOSTILE)
            rows = (await http.get("/api/open")).json()["rows"]
            assert session.session_id in [one["session_id"] for one in rows]
            shown = (await http.get(f"/api/session?id={session.session_id}")).json()
            assert shown["live"] is True
            assert shown["origin"] == {"kind": "TEXT", "document_id": "d"}
            assert shown["nodes"][0]["messages"] == [{"role": "user", "content": HOSTILE}]

        async def closed() -> bool:
            shown = (await http.get(f"/api/session?id={session.session_id}")).json()
            return shown.get("live") is False  # for a moment it is on its way to the collector

        await until(closed)


async def test_groups_series_and_the_mesh_are_shown(shared: Mesh) -> None:
    async with shared.client() as client, viewer(shared) as http:
        for index in range(2):
            await conversation(
                shared, client, group_id="g", sample_index=index, group_size=2, run_id="groups"
            )
        await listed(http, run_id="groups")

        async def both() -> Any:
            rows: list[dict[str, Any]]
            rows = (await http.get("/api/groups", params={"run_id": "groups"})).json()["rows"]
            return rows if rows[0]["sessions"] == 2 else None

        (group,) = await until(both)
        assert (group["mean"], group["variance"], group["turns"]) == (0.5, 0.0, 6)
        (point,) = (await http.get("/api/series", params={"run_id": "groups"})).json()["points"]
        assert (point["sessions"], point["reward"], point["run"], point["at"]) == (2, 0.5, 0, 0)
        mesh = (await http.get("/api/mesh")).json()
        assert {one["kind"] for one in mesh["members"]} >= {"engine", "gateway"}
        assert mesh["error"] == ""
        assert "groups" in (await http.get("/api/choices")).json()["run_id"]


async def test_an_unknown_session_and_a_wrong_order_are_errors_with_a_text(shared: Mesh) -> None:
    async with viewer(shared) as http:
        unknown = await http.get("/api/session?id=5e55")
        assert (unknown.status_code, "5e55" in unknown.json()["error"]) == (404, True)
        wrong = await http.get("/api/sessions", params={"order": "x"})
        assert (wrong.status_code, "newest" in wrong.json()["error"]) == (400, True)
        assert (await http.get("/api/sessions", params={"offset": "x"})).status_code == 400
        assert (await http.get("/../app.py")).status_code == 404


async def test_pages_load_nothing_from_elsewhere(shared: Mesh) -> None:
    async with viewer(shared) as http:
        page = await http.get("/")
        assert page.headers["content-security-policy"].startswith("default-src 'none'")
        assert "http" not in page.text
        assert (await http.get("/app.js")).headers["content-type"].startswith("text/javascript")
        elsewhere = await http.get("/api/sessions", headers={"host": "evil.example"})
        assert (elsewhere.status_code, "rows" in elsewhere.text) == (421, False)
        assert (await http.post("/api/sessions")).status_code == 405


HTML = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "srcdoc", "DOMParser")
CODE = ("eval(", "Function(", "javascript:", "@import", "url(")


async def test_no_module_makes_html_of_text_or_names_another_place() -> None:
    static = resources.files("rollmesh.view") / "static"
    texts = {one.name: one.read_text() for one in static.iterdir()}
    assert "app.js" in texts
    for name, text in texts.items():
        for wrong in HTML + CODE:
            assert wrong not in text, (name, wrong)
        places = re.findall(r"(?:https?:)?//[a-z][^\"]*", text.replace("// ", ""))
        assert set(places) <= {"http://www.w3.org/2000/svg"}, name


async def test_a_viewer_with_a_key_asks_for_it(shared: Mesh, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 40)
    async with viewer(shared, key_file=key) as http:
        assert (await http.get("/")).status_code == 200
        for cookie in ("", "k" * 40):
            http.cookies.set("rollmesh-view", cookie)
            assert (await http.get("/api/sessions")).status_code == 401
        http.cookies.clear()
        assert (await http.post("/api/login", content="wrong")).status_code == 401
        login = await http.post("/api/login", content="k" * 40 + "\n")
        assert login.status_code == 200
        assert "httponly; " in login.headers["set-cookie"].lower() + "; "
        assert "k" * 40 not in login.headers["set-cookie"]
        assert (await http.get("/api/sessions")).status_code == 200


async def test_the_key_is_asked_for_whatever_the_caller_calls_the_viewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked = Viewer(Index(), ViewSettings(hosts=frozenset({"localhost"}), key="k" * 40))
    name = "localhost:1/x?"
    monkeypatch.setattr(Request, "url", URL(f"http://{name}/api/sessions"))  # as Starlette 0.47
    transport = httpx2.ASGITransport(locked.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        assert (await http.get("/api/sessions", headers={"host": name})).status_code == 401


async def test_a_viewer_that_others_reach_needs_a_key(tmp_path: Path) -> None:
    code, errors = await run_refused("view", host="::", port=0)
    assert (code, "key-file" in errors) == (2, True)
    (tmp_path / "key").write_text("short")
    code, errors = await run_refused("view", key_file=tmp_path / "key", port=0)
    assert (code, "32 characters" in errors) == (2, True)


async def test_a_locked_mesh_shows_open_sessions_to_operators_only_also_after_a_rotation(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    locks = Locks(tmp_path / "locks")
    async with scripted_mesh(tmp_path, tokenizer_dir, locks=locks) as mesh:
        async with viewer(mesh, token_file=locks.token_file("operator")) as http:
            assert (await http.get("/api/open")).json() == {"rows": []}
            assert (await http.get("/api/mesh")).json()["sessions"] == 0
            copied = shutil.copy(locks.token_file("operator"), tmp_path / "old")
            old = Client(replace(mesh.addresses, token_file=str(copied)))
            fresh = Locks(tmp_path / "fresh")
            for name in ("accepted/operator", "operator.token"):
                (fresh.folder / name).replace(locks.folder / name)

            async def is_refused() -> bool:
                try:
                    await old.open_sessions()
                except CallerUnknownError:
                    return True
                return False

            async with old:
                await until(is_refused)

            async def is_open() -> bool:
                return (await http.get("/api/open")).status_code == 200

            await until(is_open)
        async with viewer(mesh, token_file=locks.token_file("trainer")) as http:
            assert (await http.get("/api/open")).status_code == 403


async def test_a_collector_that_is_away_is_named_and_read_again(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(tmp_path, tokenizer_dir) as mesh, mesh.client() as client:
        async with viewer(mesh) as http:
            await conversation(mesh, client, run_id="before")
            await listed(http, run_id="before")
            await mesh.processes["collector"].kill()

            async def error() -> str:
                found = await http.get("/api/choices")
                return str(found.json()["error"])

            assert await until(error)
            assert (await listed(http, run_id="before"))["total"] == 1
            await mesh.start("collector")
            await conversation(mesh, client, run_id="after")
            assert (await listed(http, run_id="after"))["total"] == 1
            assert await error() == ""


async def test_alarms_are_shown_also_while_no_router_and_no_collector_answers(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(tmp_path, tokenizer_dir) as mesh, mesh.client() as client:
        async with viewer(mesh) as http:

            async def names() -> set[tuple[str, str]]:
                found = (await http.get("/api/alarms")).json()["alarms"]
                assert all(one["message"] for one in found)
                return {(one["name"], one["where"]) for one in found}

            assert await names() == set()
            async with client.subscribe("trainer", unit="session"):
                await client.state_dict("trainer")
                await client.report_step("trainer", 1, {"loss": float("nan")})
                assert await until(names) == {("not_finite", "trainer")}
            for service in ("router", "collector"):
                await mesh.processes[service].kill()
            silent = {("server_silent", mesh.address(one)) for one in ("router", "collector")}

            async def both() -> bool:
                return silent <= await names()

            await until(both)


async def test_the_load_of_a_mesh_and_what_happened_are_shown_over_time(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    async with scripted_mesh(tmp_path, tokenizer_dir) as mesh, mesh.client() as client:
        async with viewer(mesh) as http:

            async def history() -> dict[str, list[dict[str, Any]]]:
                found: dict[str, list[dict[str, Any]]] = (await http.get("/api/history")).json()
                return found

            async def point() -> Any:
                return (await history())["points"]

            (first, *_) = await until(point)
            assert (first["engines"], first["leases"], first["queue"]) == (1, 0, 0)
            await client.push_weights({"w": np.zeros(1, np.float32)}, 1)

            async def pushed() -> bool:  # so the engine has been looked at, too
                return bool((await history())["events"])

            await until(pushed)
            await mesh.restart("engine")

            async def happened() -> bool:
                names = [one["name"] for one in (await history())["events"]]
                pushed = "version 1 of policy pushed" in names
                return pushed and any(one.startswith("engine ") for one in names)

            await until(happened)


async def test_two_viewers_of_whom_one_is_killed_show_the_same_and_take_nothing_from_consumers(
    shared: Mesh,
) -> None:
    async def rows(http: httpx2.AsyncClient) -> Any:
        found = (await http.get("/api/sessions", params={"limit": 1000})).json()["rows"]
        return {
            one["session_id"]: {name: one[name] for name in one if name != "n"} for one in found
        }

    async with shared.client() as client, viewer(shared) as other:
        async with viewer(shared) as http:
            reads = [asyncio.create_task(http.get("/api/series")) for _ in range(100)]
            watched = await conversation(shared, client, run_id="watched")
            answers = await asyncio.gather(*reads)
            for one in (http, other):
                await listed(one, run_id="watched")
        assert {one.status_code for one in answers} <= {200, 503}
        unwatched = await conversation(shared, client, run_id="unwatched")
        async with viewer(shared) as http:

            async def is_same() -> bool:
                found = await rows(http)
                known = {watched.session_id, unwatched.session_id} <= found.keys()
                return bool(known and found == await rows(other))

            await until(is_same)
            for session in (watched, unwatched):
                assert (await delivered(client, session)).reward == 0.5
