"""Messages and Responses: a mesh around the real model, and vLLM's own endpoints with it."""

import pytest

from tests.mesh.requests.free_requests import TAUGHT_MESSAGES, TAUGHT_RESPONSES
from tests.mesh.requests.protocol_answers import ask_messages, ask_responses, check
from tests.mesh.requests.protocol_requests import CLASSES, OF_MESSAGES, OF_RESPONSES
from tests.mesh.requests.serve import Servers
from tests.paths import ROOT

pytestmark = [pytest.mark.long, pytest.mark.vllm]


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", OF_MESSAGES)
async def test_messages_are_answered_as_by_vllm_or_the_difference_has_a_name(
    servers: Servers, name: str, *, stream: bool
) -> None:
    case, more = OF_MESSAGES[name], {"stream": True} if stream else {}
    ours = await ask_messages(servers.mesh, {**case.fields, **more})
    theirs = await ask_messages(servers.vllm, {**case.fields, **more})
    check(case, ours, theirs, stream=stream)


@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", OF_RESPONSES)
async def test_responses_are_answered_as_by_vllm_or_the_difference_has_a_name(
    servers: Servers, name: str, *, stream: bool
) -> None:
    case, more = OF_RESPONSES[name], {"stream": True} if stream else {}
    ours = await ask_responses(servers.mesh, {**case.fields, **more})
    theirs = await ask_responses(servers.vllm, {**case.fields, **more})
    check(case, ours, theirs, stream=stream)


def test_every_class_of_differences_is_seen_and_explained() -> None:
    asked = (OF_MESSAGES, OF_RESPONSES, TAUGHT_MESSAGES, TAUGHT_RESPONSES)
    seen = {
        case.class_of(stream=stream)
        for cases in asked
        for case in cases.values()
        for stream in (False, True)
    }
    assert seen - {""} == set(CLASSES)
    page = (ROOT / "docs" / "messages.md").read_text()
    assert [name for name in CLASSES if f"- **{name}**:" not in page] == []
