"""Reminders within a conversation, under a template whose system message must be the first."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from examples.demo.audit import Audit
from rollmesh.chat import Tokenizer
from tests.chat import families
from tests.lazily import anthropic
from tests.meshes import Mesh, delivered, scripted_mesh, write_script

pytestmark = pytest.mark.asyncio(loop_scope="module")
CALL = (
    "<tool_call>\n<function=Bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
)
RULES = [("Skills: none.", CALL), ("Date: Monday.", "There are two files."), ("Thanks.", "Bye.")]
TURN = ("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", "<|im_end|>")
TOOLS: Any = [{"name": "Bash", "description": "Runs.", "input_schema": {"type": "object"}}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Mesh]:
    folder, model = (tmp_path_factory.mktemp(name) for name in ("reminders", "qwen"))
    families.write("qwen3_5_nothink_training", model)
    tokenizer = Tokenizer(model)
    size = tokenizer.rust.get_vocab_size()
    (model / "config.json").write_text(f'{{"vocab_size": {size}, "max_position_embeddings": 9000}}')
    write_script(folder / "script.json", tokenizer, RULES, TURN)
    async with scripted_mesh(folder, model) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_reminders_are_served_and_nothing_drifts(mesh: Mesh, *, stream: bool) -> None:
    async with mesh.client() as client:
        async with (
            client.session() as session,
            anthropic.AsyncAnthropic(
                base_url=session.base_url.removesuffix("/v1"), api_key="any", max_retries=0
            ) as agent,
        ):
            history: list[Any] = []

            async def ask(*messages: tuple[str, Any]) -> Any:
                history.extend({"role": role, "content": said} for role, said in messages)
                asked: dict[str, Any] = {
                    "model": "policy",
                    "max_tokens": 200,
                    "system": "You code.",
                    "tools": TOOLS,
                    "messages": history,
                }
                if stream:
                    async with agent.messages.stream(**asked) as events:
                        answer = await events.get_final_message()
                else:
                    answer = await agent.messages.create(**asked)
                history.append({"role": "assistant", "content": answer.content})
                return answer.content[-1]

            call = await ask(("user", "Go on."), ("system", "Skills: none."))
            assert (call.name, call.input) == ("Bash", {"command": "ls"})
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "a b"}
            answer = await ask(("user", [result]), ("system", "Date: Monday."))
            assert answer.text == "There are two files."
            assert (await ask(("user", "Thanks."))).text == "Bye."
        delivery = await delivered(client, session)
    audit = Audit()
    audit.received([delivery])
    assert (audit.drift_tokens, audit.duplicated) == (0, 0)
    (trajectory,) = delivery.trajectories
    assert (trajectory.lineage, trajectory.turns) == ("MAIN", 3)
    assert trajectory.reasons == ("EXACT",)
