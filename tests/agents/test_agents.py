"""Published agents, unmodified: each conversation is one main trajectory, exact to the token."""

from pathlib import Path

import pytest

from tests.agents import dialogues
from tests.agents.processes import Outside, run_agent
from tests.agents.trajectories import check_main, delivered
from tests.meshes import Mesh

pytestmark = pytest.mark.asyncio(loop_scope="session")

CHAT = [reply for _, reply in dialogues.CHAT]
QUESTIONS = (dialogues.QUESTION, dialogues.LAST)
ANSWERS = [dialogues.ANSWER, dialogues.FAREWELL]
LONG = pytest.mark.long
"""Of a way to use an SDK or an agent of which another way is in `make test`."""


@pytest.mark.parametrize(
    ("script", "arguments", "reasons"),
    [
        pytest.param("openai_chat", ("message",), (), id="openai-whole"),
        pytest.param("openai_chat", ("dump",), (), id="openai-whole-dumped", marks=LONG),
        pytest.param("openai_chat", ("helper",), (), id="openai-streamed-by-the-helper"),
        pytest.param("openai_chat", ("accumulated",), (), id="openai-streamed-by-hand", marks=LONG),
        pytest.param("anthropic_messages", ("message",), (), id="anthropic-whole", marks=LONG),
        pytest.param("anthropic_messages", ("helper",), (), id="anthropic-streamed"),
        pytest.param("anthropic_messages", ("runner",), (), id="anthropic-tool-runner", marks=LONG),
        pytest.param(
            "anthropic_messages",
            ("streaming-runner",),
            (),
            id="anthropic-tool-runner-streamed",
            marks=LONG,
        ),
        pytest.param("openai_agents", ("whole", "chat"), (), id="openai-agents-whole", marks=LONG),
        pytest.param(
            "openai_agents", ("streamed", "chat"), (), id="openai-agents-streamed", marks=LONG
        ),
        pytest.param(
            "openai_agents", ("whole", "responses"), (), id="openai-agents-responses", marks=LONG
        ),
        pytest.param(
            "openai_agents", ("streamed", "responses"), (), id="openai-agents-responses-streamed"
        ),
        pytest.param("langgraph_react", ("whole", ""), (), id="langgraph-whole", marks=LONG),
        pytest.param("langgraph_react", ("streamed", ""), (), id="langgraph-streamed", marks=LONG),
        pytest.param(
            "langgraph_react", ("whole", "worker"), ("LENIENT_ECHO",), id="langgraph-named"
        ),
    ],
)
async def test_a_conversation_with_tools_is_one_exact_trajectory(
    agents_mesh: Mesh,
    outside: Outside,
    tmp_path: Path,
    script: str,
    arguments: tuple[str, ...],
    reasons: tuple[str, ...],
) -> None:
    async with agents_mesh.client() as client:
        async with client.session() as session:
            answers = await run_agent(script, session, outside, tmp_path, *arguments, *QUESTIONS)
        result = await delivered(client, session)
    assert answers == ANSWERS
    check_main(agents_mesh, result, CHAT, *reasons)


async def test_a_call_that_langchain_mended_and_ran_keeps_its_tokens(
    agents_mesh: Mesh, outside: Outside, tmp_path: Path
) -> None:
    arguments = ("streamed", "", dialogues.BROKEN_QUESTION)
    async with agents_mesh.client() as client:
        async with client.session() as session:
            answers = await run_agent("langgraph_react", session, outside, tmp_path, *arguments)
        result = await delivered(client, session)
    replies = [reply for _, reply in dialogues.BROKEN]
    assert answers == replies[1:]
    check_main(agents_mesh, result, replies, "LENIENT_ECHO", "MALFORMED_TOOL_CALL")


async def test_mini_swe_agent_solves_its_task_in_one_exact_trajectory(
    agents_mesh: Mesh, outside: Outside, tmp_path: Path
) -> None:
    arguments = ("mini", "litellm", dialogues.TASK)
    async with agents_mesh.client() as client:
        async with client.session() as session:
            end = await run_agent("mini_swe", session, outside, tmp_path, *arguments)
        result = await delivered(client, session)
    assert end["exit_status"] == "Submitted"
    assert (tmp_path / "greeting").read_text() == "café 42\n"
    check_main(agents_mesh, result, [reply for _, reply in dialogues.MINI])


@LONG
async def test_mini_swe_agent_with_commands_in_its_text_is_one_exact_trajectory(
    agents_mesh: Mesh, outside: Outside, tmp_path: Path
) -> None:
    arguments = ("mini_textbased", "litellm_textbased", dialogues.TASK)
    async with agents_mesh.client() as client:
        async with client.session() as session:
            end = await run_agent("mini_swe", session, outside, tmp_path, *arguments)
        result = await delivered(client, session)
    assert end["exit_status"] == "Submitted"
    assert (tmp_path / "greeting").read_text() == "two\n"
    check_main(agents_mesh, result, [reply for _, reply in dialogues.MINI_TEXT])


@LONG
async def test_mini_swe_agent_knows_a_conversation_that_grew_too_long(
    agents_mesh: Mesh, outside: Outside, tmp_path: Path
) -> None:
    arguments = ("mini", "litellm", "write " * 20_000)
    async with agents_mesh.client() as client, client.session() as session:
        # Any other error it would try again, for minutes.
        with pytest.raises(AssertionError, match="ContextWindowExceededError"):
            await run_agent("mini_swe", session, outside, tmp_path, *arguments)


@LONG
async def test_a_turn_that_mini_swe_agent_drops_stays_a_leaf_of_its_own(
    agents_mesh: Mesh, outside: Outside, tmp_path: Path
) -> None:
    async with agents_mesh.client() as client:
        async with client.session() as session:
            arguments = ("benchmarks/swebench", "litellm", dialogues.TALK)
            end = await run_agent("mini_swe", session, outside, tmp_path, *arguments)
        result = await delivered(client, session)
    assert end["exit_status"] == "Submitted"
    assert [(t.lineage, t.turns) for t in result.trajectories] == [("MAIN", 1), ("BRANCH", 1)]
    assert all(t.reasons == ("EXACT",) for t in result.trajectories)


async def test_missing_agents_are_a_failure_that_names_the_remedy(
    agents_mesh: Mesh, outside: Outside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.agents.processes.ENVIRONMENT", tmp_path)
    async with agents_mesh.client() as client, client.session() as session:
        with pytest.raises(AssertionError, match=r"run `make \.venv-agents/\.ready`"):
            await run_agent("openai_chat", session, outside, tmp_path, "message", "Hello")
