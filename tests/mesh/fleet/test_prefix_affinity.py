"""Sessions whose prompts begin alike share an engine if the router looks at prompts."""

from pathlib import Path

from tests.meshes import Mesh, scripted_mesh

TASK, OTHER = "one task " * 200, "another one " * 200


async def sessions_of(mesh: Mesh) -> dict[str, int]:
    async with mesh.client() as client:
        replicas = (await client.replicas()).replicas
    return {one.hello.replica_id: one.sessions for one in replicas if one.hello.lease_capacity}


async def test_sessions_of_one_task_share_an_engine(tmp_path: Path, tokenizer_dir: Path) -> None:
    first = {"router": {"policy": "prefix_affinity"}}
    async with scripted_mesh(tmp_path, tokenizer_dir, first=first) as mesh:
        await mesh.start("engine", port=0, engine_id="engine-1")
        async with mesh.client() as client:
            seen = []
            for text in (TASK, f"{TASK} now", OTHER):
                session = await client.open_session(client.session_request())
                messages = [{"role": "user", "content": text}]
                chat = mesh.openai(session).chat.completions
                await chat.create(model="policy", messages=messages)  # type: ignore[arg-type]
                seen.append(sorted((await sessions_of(mesh)).values()))
    assert seen == [[0, 1], [0, 2], [1, 2]]
