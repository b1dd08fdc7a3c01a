import asyncio
import signal
import sys

import pytest

from rollmesh.client import Client, MeshAddresses, Session, sync
from rollmesh.mesh import retried
from rollmesh.runtime.errors import (
    InvalidFieldError,
    RemoteError,
    SessionUnknownError,
    TooManySessionsError,
)
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc, sampling_pb2, session_pb2
from tests.client.conftest import addresses_of
from tests.sidecar.scripted_gateway import ScriptedGateway, serving

COMPLETED = session_pb2.SESSION_OUTCOME_COMPLETED
FAILED = session_pb2.SESSION_OUTCOME_FAILED
ABORTED = session_pb2.SESSION_OUTCOME_ABORTED


async def test_a_session_tells_an_agent_where_to_go_and_closes_with_its_reward(
    gateway: ScriptedGateway, client: Client
) -> None:
    async with client.session(
        group_id="g",
        sample_index=2,
        group_size=8,
        sampling={"temperature": 0.5},
        sampling_policy="enforce",
        metadata={"a": "b"},
    ) as session:
        assert session.base_url == f"http://127.0.0.1:7080/sessions/{session.api_key}/v1"
        assert session.keyless_url == f"http://127.0.0.1:7080/sessions/{session.session_id}/v1"
        assert session.api_key == f"rmk-{session.session_id}-secret"
        assert session.api_key not in repr(session)
        session.reward = 1.0
    opened, closed = gateway.opened[0], gateway.closed[0]
    assert (opened.group_id, opened.sample_index, opened.group_size) == ("g", 2, 8)
    assert opened.sampling == sampling_pb2.SamplingParams(temperature=0.5)
    assert opened.sampling_policy == sampling_pb2.SAMPLING_POLICY_ENFORCE
    assert dict(opened.metadata) == {"a": "b"}
    assert (closed.rewards.reward, closed.outcome) == (1.0, COMPLETED)
    assert closed.session_key == session.api_key


async def test_a_session_closed_in_the_block_is_closed_once(
    gateway: ScriptedGateway, client: Client
) -> None:
    async with client.session() as session:
        session.reward = 0.5
        ids = await client.close_session(session, outcome="ABORTED", metadata={"c": "d"})
    assert ids == [f"{session.session_id}-1"]
    assert [(closed.outcome, closed.rewards.reward) for closed in gateway.closed] == [
        (ABORTED, 0.5)
    ]
    assert dict(gateway.closed[0].metadata) == {"c": "d"}


async def test_no_reward_is_not_a_reward_of_zero(gateway: ScriptedGateway, client: Client) -> None:
    async with client.session():
        pass
    async with client.session() as session:
        session.reward = 0.0
    assert [closed.rewards.HasField("reward") for closed in gateway.closed] == [False, True]


async def test_an_exception_closes_as_failed_and_goes_on(
    gateway: ScriptedGateway, client: Client
) -> None:
    with pytest.raises(ZeroDivisionError):
        async with client.session():
            raise ZeroDivisionError
    assert gateway.closed[0].outcome == FAILED


async def test_a_cancellation_closes_as_aborted(gateway: ScriptedGateway, client: Client) -> None:
    opened = asyncio.Event()

    async def hold() -> None:
        async with client.session():
            opened.set()
            await asyncio.Event().wait()

    holding = asyncio.ensure_future(hold())
    await opened.wait()
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    assert gateway.closed[0].outcome == ABORTED


async def test_a_full_gateway_is_asked_again_for_the_same_session(
    gateway: ScriptedGateway, client: Client
) -> None:
    gateway.failures = [TooManySessionsError("full", retry_delay_ms=1)] * 2
    await client.open_session(gateway_pb2.CreateSessionRequest())
    assert len(gateway.opened) == 3
    ids = {request.request_id for request in gateway.opened}
    assert len(ids) == 1
    assert ids != {""}


async def test_what_waiting_does_not_heal_is_raised_at_once_and_typed(
    gateway: ScriptedGateway, client: Client
) -> None:
    session = await client.open_session(gateway_pb2.CreateSessionRequest())
    gateway.failures = [SessionUnknownError("session_id: is unknown")]
    with pytest.raises(SessionUnknownError):
        await client.close_session(session)
    assert not session.closed


async def test_a_service_that_does_not_answer_is_said_to_be_away() -> None:
    request = gateway_pb2.GetSessionRequest(session_id="5e55")
    async with open_channel("127.0.0.1:1") as channel:
        ask = gateway_pb2_grpc.GatewayServiceStub(channel).GetSession
        with pytest.raises(RemoteError, match=r"no answer within 0\.1 s: the service is away"):
            await retried(lambda left_s: ask(request, timeout=left_s, wait_for_ready=True), 0.1)


def test_the_addresses_are_read_from_the_line_that_up_prints() -> None:
    line = '{"router": "r:1", "gateway": "g:2", "collector": "c:3", "sidecar": "s:4", "more": 1}'
    assert MeshAddresses.from_json(line) == MeshAddresses(
        router="r:1", gateway="g:2", collector="c:3", sidecar="s:4"
    )


async def test_the_sync_client_does_the_same_without_a_loop(
    gateway: ScriptedGateway, address: str
) -> None:
    async def agent(prompt: str, session: Session) -> float:
        return float(len(prompt + session.session_id))

    def fail(client: sync.Client) -> None:
        with client.session():
            raise ZeroDivisionError

    def work() -> dict[str, int]:
        with sync.Client(addresses_of(gateway=address)) as client:
            with client.session(group_id="g") as session:
                session.reward = 0.5
            with pytest.raises(ZeroDivisionError):
                fail(client)
            with pytest.raises(InvalidFieldError), client.session(sampling={"heat": 1}):
                pass
            return client.rollout(["p"], runner=agent, n=2).counts

    assert await asyncio.to_thread(work) == {"COMPLETED": 2}
    outcomes = [closed.outcome for closed in gateway.closed]
    assert outcomes == [COMPLETED, FAILED, COMPLETED, COMPLETED]
    assert gateway.closed[0].rewards.reward == 0.5


INTERRUPTED = """
import _thread, asyncio, sys
from rollmesh.client import MeshAddresses, sync

async def agent(prompt, session):
    if sys.argv[2] == "unseen":
        _thread.interrupt_main()
    print("begun", flush=True)
    await asyncio.Event().wait()

addresses = MeshAddresses(router="", gateway=sys.argv[1], collector="", sidecar="")
with sync.Client(addresses) as client:
    try:
        client.rollout(["p"], runner=agent, n=1)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("signal", id="a signal"),
        pytest.param("unseen", id="one that came before the wait and did not cut it"),
    ],
)
async def test_ctrl_c_in_the_sync_client_closes_its_sessions_first(how: str) -> None:
    gateway = ScriptedGateway()
    async with asyncio.timeout(60), serving(gateway) as address:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", INTERRUPTED, address, how, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"begun\n"
        if how == "signal":
            process.send_signal(signal.SIGINT)
        output, _ = await process.communicate()
        assert (process.returncode, output) == (0, b"interrupted\n")
        assert [closed.outcome for closed in gateway.closed] == [ABORTED]


@pytest.mark.parametrize("ends_well", [True, False], ids=["ends well", "fails"])
async def test_a_block_that_ends_well_may_wait_for_its_rewards(
    gateway: ScriptedGateway, address: str, *, ends_well: bool
) -> None:
    def work() -> None:
        with (
            sync.Client(addresses_of(gateway=address)) as client,
            client.session(reward_timeout_ms=5000),
        ):
            if not ends_well:
                raise ValueError("no")

    async with asyncio.timeout(60):
        (result,) = await asyncio.gather(asyncio.to_thread(work), return_exceptions=True)
    assert isinstance(result, ValueError) != ends_well
    (closed,) = gateway.closed
    assert closed.HasField("reward_timeout_ms") == ends_well
    assert closed.reward_timeout_ms == (5000 if ends_well else 0)
