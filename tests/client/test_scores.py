"""What the client makes of engines that a router lists, and of answers that do not fit."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from rollmesh.client import Client
from rollmesh.runtime.errors import EngineFaultError, InvalidFieldError, NoEngineError
from rollmesh.runtime.rpc import Context, RpcInterceptor
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, router_pb2, router_pb2_grpc
from tests.client.conftest import addresses_of

TOKENIZERS = {"policy": "ab" * 32, "small": "ab" * 32, "other": "cd" * 32, "bare": ""}
"""By model."""
GOOD = [
    engine_pb2.ScoreTokensResponse(
        logprobs_f32le=np.array([-1], "<f4").tobytes(),
        top_ids_u32le=np.array([7, 8], "<u4").tobytes(),
        top_logprobs_f32le=np.array([-0.5, -1], "<f4").tobytes(),
        policy_version=3,
    )
]


class Engine(engine_pb2_grpc.EngineServiceServicer):
    """Answers as a test says."""

    def __init__(self, answer: Sequence[engine_pb2.ScoreTokensResponse]) -> None:
        self.answer = answer

    async def ScoreTokens(
        self, request: engine_pb2.ScoreTokensRequest, context: Context
    ) -> AsyncIterator[engine_pb2.ScoreTokensResponse]:
        for one in self.answer:
            yield one


class Router(router_pb2_grpc.RouterServiceServicer):
    """Lists one engine of each model, all at one address."""

    def __init__(self) -> None:
        self.address = ""
        self.excluded: dict[str, router_pb2.ExclusionReason.ValueType] = {}
        self.absent = {"absent"}

    async def ListReplicas(
        self, request: router_pb2.ListReplicasRequest, context: Context
    ) -> router_pb2.ListReplicasResponse:
        listed = router_pb2.ListReplicasResponse()
        for at, (model, tokenizer) in enumerate(TOKENIZERS.items()):
            hello = router_pb2.ReplicaHello(
                replica_id=f"engine-{model}",
                kind=router_pb2.REPLICA_KIND_ENGINE,
                address=self.address,
                model=model,
                lease_capacity=1,
                tokenizer_sha256=tokenizer,
                vocabulary_tokens=400 + at,
            )
            replica = listed.replicas.add(hello=hello)
            if model in self.excluded:
                replica.exclusion.reason = self.excluded[model]
                replica.exclusion.explanation = "why"
        listed.models.extend(
            router_pb2.ModelWeights(model=model) for model in (*TOKENIZERS, *self.absent)
        )
        return listed


@asynccontextmanager
async def scoring(
    answer: Sequence[engine_pb2.ScoreTokensResponse] = GOOD, **excluded: Any
) -> AsyncIterator[Client]:
    """A client of a mesh whose engines answer alike. `excluded` has reasons by model."""
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    router = Router()  # type: ignore[abstract]  # the other methods are not called
    engine = Engine(answer)  # type: ignore[abstract]  # likewise
    router.excluded = excluded
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
    engine_pb2_grpc.add_EngineServiceServicer_to_server(engine, server)
    router.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with Client(addresses_of(router=router.address)) as client:
            yield client
    finally:
        await server.stop(0)


async def test_a_teacher_is_known_by_its_tokenizer_whatever_the_size_of_its_vocabulary() -> None:
    async with scoring() as client:
        scores = await client.score([5, 6], model="small", top_k=2, same_vocabulary_as="policy")
        assert scores.engine_id == "engine-small"
        assert (scores.logprobs.tolist(), scores.policy_version) == ([0.0, -1.0], 3)
        for model, has in (
            ("other", f"the tokenizer {'cd' * 32}"),
            ("bare", "no tokenizer and 403"),
        ):
            with pytest.raises(InvalidFieldError) as caught:
                await client.score([5, 6], model=model, top_k=2, same_vocabulary_as="policy")
            assert caught.value.field == "same_vocabulary_as"
            assert f"engine-{model} of '{model}' has {has}" in caught.value.message
            assert (
                f"engine-policy of 'policy' has the tokenizer {'ab' * 32}" in caught.value.message
            )


async def test_a_model_without_an_engine_is_nothing_to_compare_with() -> None:
    async with scoring() as client:
        with pytest.raises(NoEngineError, match="same_vocabulary_as: the model has no engine"):
            await client.score([5, 6], model="small", same_vocabulary_as="absent", timeout_s=0.5)
        with pytest.raises(NoEngineError, match=r"can score now \(none is there\)"):
            await client.score([5, 6], model="absent", timeout_s=0.5)


@pytest.mark.parametrize("reason", [*router_pb2.ExclusionReason.values()][1:])
async def test_an_engine_that_gateways_may_not_lease_does_not_score_unless_for_its_tokenizer(
    reason: router_pb2.ExclusionReason.ValueType,
) -> None:
    async with scoring(policy=reason) as client:
        if reason == router_pb2.EXCLUSION_REASON_MISFIT:
            assert (await client.score([5, 6], model="policy", top_k=2)).start == 1
            return
        with pytest.raises(NoEngineError, match="engine-policy: why"):
            await client.score([5, 6], model="policy", timeout_s=0.5)


@pytest.mark.parametrize(
    "answer",
    [
        [],
        [*GOOD, *GOOD],
        [engine_pb2.ScoreTokensResponse(logprobs_f32le=bytes(4), policy_version=3)],
        [*GOOD, engine_pb2.ScoreTokensResponse(policy_version=4)],
    ],
    ids=["nothing", "too much", "no ids", "two versions"],
)
async def test_an_answer_that_does_not_fit_its_request_is_a_fault_of_the_engine(
    answer: list[engine_pb2.ScoreTokensResponse],
) -> None:
    async with scoring(answer) as client:
        with pytest.raises(EngineFaultError, match="engine-policy answered"):
            await client.score([5, 6], model="policy", top_k=2)
