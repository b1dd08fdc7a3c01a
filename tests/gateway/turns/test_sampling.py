"""How each turn was sampled, from the request to the record that a trainer receives."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollmesh.chat import Tokenizer
from rollmesh.client import SessionResult, Subscription
from rollmesh.runtime.errors import InvalidFieldError, InvalidSamplingError, SessionLimitError
from rollmesh.runtime.rpc import read_stream, typed_errors
from rollmesh.v1 import chat_pb2, gateway_pb2, sampling_pb2, trajectory_pb2
from tests.gateway.live import Cut, LiveMesh
from tests.meshes import write_script
from tests.messages import close_of, said

CHANGED = "SAMPLING_CHANGED"
CHANGED_NUMBER = trajectory_pb2.FIDELITY_REASON_SAMPLING_CHANGED
ENFORCE = sampling_pb2.SAMPLING_POLICY_ENFORCE
REFUSE = sampling_pb2.SAMPLING_POLICY_REFUSE
EXPORTS = {  # and the turns of each trajectory of two turns on one path
    gateway_pb2.EXPORT_MODE_LEAVES: [2],
    gateway_pb2.EXPORT_MODE_TURNS: [1, 2],
    gateway_pb2.EXPORT_MODE_TREE: [],
}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(
    tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path, tokenizer: Tokenizer
) -> AsyncIterator[LiveMesh]:
    folder = tmp_path_factory.mktemp("live")
    rules = [("plain", "Ten words and then some more of them."), ("then", "Another answer.")]
    write_script(folder / "script.json", tokenizer, rules)
    async with LiveMesh(folder, tokenizer_dir, script=folder / "script.json") as mesh:
        yield mesh


class Talk:
    """A session that an agent talks in."""

    def __init__(self, mesh: LiveMesh, opened: gateway_pb2.CreateSessionResponse) -> None:
        self._mesh, self._opened = mesh, opened

    @classmethod
    async def open(cls, mesh: LiveMesh, **fields: Any) -> "Talk":
        fields["sampling"] = sampling_pb2.SamplingParams(**fields.get("sampling", {}))
        request = gateway_pb2.CreateSessionRequest(**fields)
        return cls(mesh, await mesh.stub.CreateSession(request))

    def request(
        self, *messages: chat_pb2.ChatMessage, bad_words: Any = (), fields: Any = None, **how: Any
    ) -> gateway_pb2.ChatRequest:
        return gateway_pb2.ChatRequest(
            session_id=self._opened.session_id,
            session_key=self._opened.session_key,
            messages=messages or [said("plain")],
            sampling=sampling_pb2.SamplingParams(**how),
            bad_words=bad_words,
            **(fields or {}),
        )

    async def ask(
        self, *messages: chat_pb2.ChatMessage, stream: bool = False, **how: Any
    ) -> gateway_pb2.ChatAnswer:
        (answer,) = await self.answers(self.request(*messages, **how), stream=stream)
        return answer

    async def answers(
        self, request: gateway_pb2.ChatRequest, *, stream: bool = False
    ) -> list[gateway_pb2.ChatAnswer]:
        if not stream:
            with typed_errors():
                return list((await self._mesh.stub.Chat(request)).answers)
        call = self._mesh.stub.StreamChat(gateway_pb2.StreamChatRequest(chat=request))
        return [event.done async for event in read_stream(call) if event.HasField("done")]

    async def close(self) -> SessionResult:
        """Closes the session. Returns what the trainer gets of it."""
        await self._mesh.stub.CloseSession(close_of(self._opened))
        async with Subscription(self._mesh.collector, consumer="t", unit="session") as deliveries:
            delivery = await anext(deliveries)
            await deliveries.acknowledge(delivery)
        (result,) = delivery.sessions
        assert result.session_id == self._opened.session_id
        return result

    async def nodes(self) -> list[gateway_pb2.SessionNode]:
        request = gateway_pb2.GetSessionRequest(session_id=self._opened.session_id)
        found = await self._mesh.stub.GetSession(request)
        return [node for node in found.nodes if node.sampled]


def turns_of(result: SessionResult) -> list[Any]:
    """The sampled segments or nodes of a session, each turn once, in order."""
    if result.tree is not None:
        return [node for node in result.tree.nodes if node.sampled]
    segments = [one for trajectory in result.trajectories for one in trajectory.segments]
    return list({one.node_id: one for one in segments if one.sampled}.values())


@pytest.mark.parametrize("export", EXPORTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_turn_of_another_temperature_says_so_in_every_export(
    mesh: LiveMesh, export: gateway_pb2.ExportMode.ValueType, *, stream: bool
) -> None:
    talk = await Talk.open(mesh, export_mode=export)
    first = await talk.ask(stream=stream)
    changed = await talk.ask(
        said("plain"), first.message, said("then"), stream=stream, temperature=0.0, top_p=0.5
    )
    assert [len(one.reasons) for one in (first, changed)] == [0, 1]
    assert [node.sampling.HasField("temperature") for node in await talk.nodes()] == [False, True]
    result = await talk.close()
    plain, other = turns_of(result)
    assert (CHANGED_NUMBER in plain.reasons, CHANGED_NUMBER in other.reasons) == (False, True)
    assert (other.sampling.temperature, other.sampling.top_p) == (0.0, 0.5)
    assert other.sampling.max_tokens > 0
    assert [one.turns for one in result.trajectories] == EXPORTS[export]
    for one in result.trajectories:
        assert (CHANGED in one.reasons) == (one.turns == 2)
        assert one.loss_mask.any()  # it informs. Nothing is left out
    assert result.tree is None or result.tree.reasons == (CHANGED,)


async def test_an_unknown_form_of_an_export_is_refused(mesh: LiveMesh) -> None:
    with pytest.raises(InvalidFieldError, match="export_mode"), typed_errors():
        await Talk.open(mesh, export_mode=9)


async def test_the_distribution_is_compared_with_the_sessions(mesh: LiveMesh) -> None:
    talk = await Talk.open(mesh, sampling={"temperature": 0.7, "top_p": 0.9})
    truncated = trajectory_pb2.FIDELITY_REASON_TRUNCATED_SUPPORT
    assert (await talk.ask()).reasons == [truncated]
    assert (await talk.ask(temperature=0.7)).reasons == [truncated]
    assert (await talk.ask(temperature=1.0)).reasons == [CHANGED_NUMBER, truncated]
    own, equal, other = turns_of(await talk.close())
    assert own.sampling.temperature == equal.sampling.temperature == pytest.approx(0.7)
    assert other.sampling.temperature == 1.0
    assert other.sampling.top_p == pytest.approx(0.9)


async def test_samples_and_retries_carry_their_sampling_parameters(mesh: LiveMesh) -> None:
    talk = await Talk.open(mesh)
    siblings = await talk.answers(talk.request(temperature=0.5, fields={"choices": 3}))
    retry = await talk.answers(
        talk.request(temperature=0.5, fields={"choices": 3, "retry_count": 1})
    )
    assert [one.answer_id for one in retry] == [one.answer_id for one in siblings]
    plain = await talk.ask()
    await mesh.stub.CountTokens(gateway_pb2.CountTokensRequest(chat=talk.request(temperature=0.1)))
    found = turns_of(await talk.close())
    assert [one.sampling.temperature for one in found] == [0.5, 0.5, 0.5, 0.0]
    assert [CHANGED_NUMBER in one.reasons for one in found] == [True, True, True, False]
    assert not plain.reasons


async def test_a_migrated_turn_keeps_the_parameters_of_the_whole_turn(mesh: LiveMesh) -> None:
    talk = await Talk.open(mesh)
    mesh.cuts[:] = [Cut(2, "dies"), Cut(4, "aborts")]
    await talk.ask(temperature=0.5, max_tokens=20, min_tokens=6)
    (turn,) = turns_of(await talk.close())
    assert (turn.sampling.max_tokens, turn.sampling.min_tokens) == (20, 6)
    assert CHANGED_NUMBER in turn.reasons
    assert [one.sampling.min_tokens for one in mesh.generations[-3:]] == [6, 4, 2]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_enforced_session_samples_as_it_says(mesh: LiveMesh, *, stream: bool) -> None:
    talk = await Talk.open(mesh, sampling={"temperature": 0.7}, sampling_policy=ENFORCE)
    answer = await talk.ask(
        stream=stream,
        temperature=0.0,
        top_k=1,
        seed=4,
        logit_bias={5: 2.0},
        bad_words=["more"],
        max_tokens=3,
        stop_token_ids=[9],
    )
    assert answer.finish_reason == sampling_pb2.FINISH_REASON_LENGTH
    sampling = mesh.generations[-1].sampling
    assert sampling.temperature == pytest.approx(0.7)
    assert (sampling.top_k, sampling.HasField("seed"), sampling.max_tokens) == (0, False, 3)
    assert not sampling.logit_bias
    assert not sampling.bad_sequences
    assert 9 in sampling.stop_token_ids
    again = await talk.answers(
        talk.request(temperature=0.9, max_tokens=3, stop_token_ids=[9], fields={"retry_count": 1})
    )
    assert again[0].answer_id == answer.answer_id  # ignored parameters make no other request
    (turn,) = turns_of(await talk.close())
    assert CHANGED_NUMBER not in turn.reasons
    assert turn.sampling.temperature == pytest.approx(0.7)


async def test_parameters_and_policies_survive_a_restart(mesh: LiveMesh) -> None:
    agents = await Talk.open(mesh)
    enforced = await Talk.open(mesh, sampling_policy=ENFORCE)
    for talk in (agents, enforced):
        await talk.ask(temperature=0.5)
    await mesh.start_gateway()
    for talk in (agents, enforced):
        await talk.ask(said("then"), temperature=0.25)
    found = [one.sampling.temperature for one in turns_of(await agents.close())]
    assert found == [0.5, 0.25]
    found = [one.sampling.HasField("temperature") for one in turns_of(await enforced.close())]
    assert found == [False, False]


async def test_sessions_without_a_policy_take_the_gateways(mesh: LiveMesh) -> None:
    try:
        await mesh.start_gateway(sampling_policy="refuse")
        default = await Talk.open(mesh)
        with pytest.raises(InvalidSamplingError, match="temperature"):
            await default.ask(temperature=0.5)
        agents = await Talk.open(mesh, sampling_policy=sampling_pb2.SAMPLING_POLICY_AGENT)
        assert (await agents.ask(temperature=0.5)).reasons
    finally:
        await mesh.start_gateway()


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("temperature", 3.0, "is 3; give 0 to 2"),
        ("temperature", -0.5, "is -0.5; give 0 to 2"),
        ("temperature", float("nan"), "is nan; give 0 to 2"),
        ("top_p", 0.0, "is 0; give 1e-06 to 1"),
        ("min_p", 1.5, "is 1.5; give 0 to 1"),
        ("presence_penalty", 2.5, "is 2.5; give -2 to 2"),
        ("frequency_penalty", float("-inf"), "is -inf; give -2 to 2"),
        ("repetition_penalty", 0.0, "is 0; give 1e-06 to 100"),
        ("max_tokens", 0, "is 0; give at least 1"),
    ],
)
async def test_a_session_is_not_opened_with_sampling_out_of_range(
    mesh: LiveMesh, name: str, value: float, problem: str
) -> None:
    with pytest.raises(InvalidSamplingError) as refused, typed_errors():
        await Talk.open(mesh, sampling={name: value})
    assert refused.value.message == f"sampling.{name}: {problem}"


async def test_an_unknown_policy_is_refused(mesh: LiveMesh) -> None:
    with pytest.raises(InvalidFieldError, match="sampling_policy"), typed_errors():
        await Talk.open(mesh, sampling_policy=9)


@pytest.mark.parametrize("export", EXPORTS)
async def test_parameters_count_in_the_size_of_a_record(
    mesh: LiveMesh, export: gateway_pb2.ExportMode.ValueType
) -> None:
    """A record that only its parameters make too large is refused before it is sampled."""
    biases = dict.fromkeys(range(300), 1.0)
    one_turn = sampling_pb2.SamplingParams(logit_bias=biases).ByteSize()
    talk = await Talk.open(mesh, export_mode=export)
    try:
        await mesh.start_gateway(max_session_record_bytes=10 * one_turn)
        with pytest.raises(SessionLimitError, match="max_session_record_bytes"):
            await asking_again(talk, 20, logit_bias=biases)
    finally:
        await mesh.start_gateway()
    result = await talk.close()
    turns = turns_of(result)
    assert 2 < len(turns) < 10
    assert sum(one.sampling.ByteSize() for one in turns) > 2 * one_turn


async def asking_again(talk: Talk, times: int, **how: Any) -> None:
    for _ in range(times):
        await talk.ask(max_tokens=2, **how)
