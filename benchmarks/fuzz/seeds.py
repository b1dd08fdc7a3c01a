"""Valid messages of the RPCs that have much to check, about sessions of this run."""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from rollmesh.client import Session
from rollmesh.internal.v1 import leases_pb2, members_pb2, tunnels_pb2
from rollmesh.v1 import (
    chat_pb2,
    collector_pb2,
    engine_pb2,
    gateway_pb2,
    router_pb2,
    sampling_pb2,
    session_pb2,
    trajectory_pb2,
)
from tests.collector.records import record

CONSUMER = "fuzz"
_EDGE = trajectory_pb2.LineageEdge(
    source_request_id="a", target_request_id="b", type="compaction_attempt"
)


def seeds(session: Session, model: str) -> Mapping[str, Sequence[Message]]:
    """Returns messages by the name of their method.

    Args:
        session: An open session.
        model: Name of the mesh's model.
    """
    return {**_gateway(session, model), **_engine(model), **_router(model), **_collector(session)}


def _gateway(session: Session, model: str) -> dict[str, Sequence[Message]]:
    of: dict[str, Any] = {"session_id": session.session_id, "session_key": session.api_key}
    user = chat_pb2.ChatMessage(
        role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text="go on")]
    )
    chat = gateway_pb2.ChatRequest(
        **of, messages=[user], sampling=sampling_pb2.SamplingParams(max_tokens=3)
    )
    answer = f"chatcmpl-{session.session_id}-2"
    return {
        "CreateSession": [gateway_pb2.CreateSessionRequest(model=model, group_id="g")],
        "Chat": [chat],
        "StreamChat": [gateway_pb2.StreamChatRequest(chat=chat)],
        "CountTokens": [gateway_pb2.CountTokensRequest(chat=chat)],
        "GetAnswer": [gateway_pb2.GetAnswerRequest(**of, answer_id=answer, with_messages=True)],
        "WithdrawAnswer": [gateway_pb2.WithdrawAnswerRequest(**of, answer_id=answer)],
        "DeclareLineage": [gateway_pb2.DeclareLineageRequest(**of, edges=[_EDGE])],
        "GetSession": [
            gateway_pb2.GetSessionRequest(session_id=of["session_id"], with_messages=True)
        ],
    }


def _engine(model: str) -> dict[str, Sequence[Message]]:
    generate = engine_pb2.GenerateRequest(
        request_id="fuzz",
        token_ids_u32le=b"\5\0\0\0\6\0\0\0",
        model=model,
        sampling=sampling_pb2.SamplingParams(max_tokens=2),
    )
    streamed = engine_pb2.StreamedGenerate(generate=generate, max_chunk_tokens=1)
    header = engine_pb2.UpdateWeightsHeader(
        policy_version=1, pause_mode=engine_pb2.PAUSE_MODE_KEEP, safetensors_bytes=8, model=model
    )
    control = engine_pb2.ControlEnginesRequest
    return {
        "Generate": [generate],
        "Generations": [
            engine_pb2.GenerationsRequest(
                begin=[engine_pb2.BeginGeneration(number=1, request=streamed)], abort=[2], drop=[3]
            )
        ],
        "ScoreTokens": [
            engine_pb2.ScoreTokensRequest(
                request_id="fuzz-score",
                token_ids_u32le=b"\5\0\0\0\6\0\0\0",
                model=model,
                start=1,
                ids_u32le=b"\7\0\0\0\xff\xff\xff\xff",
            )
        ],
        "UpdateWeights": [
            engine_pb2.UpdateWeightsRequest(header=header),
            engine_pb2.UpdateWeightsRequest(safetensors_chunk=b"\0" * 4),
        ],
        "LoadAdapter": [
            engine_pb2.LoadAdapterRequest(header=_adapter(model)),
            engine_pb2.LoadAdapterRequest(safetensors_chunk=b"\0" * 8),
        ],
        "ControlEngines": [
            control(model=model, init_weight_transfer=control.InitWeightTransfer(backend="nccl"))
        ],
    }


def _adapter(model: str) -> engine_pb2.AdapterHeader:
    return engine_pb2.AdapterHeader(
        model=model,
        adapter=sampling_pb2.AdapterRef(name="fuzz", version=1),
        config_json='{"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}',
        safetensors_bytes=8,
    )


def _router(model: str) -> dict[str, Sequence[Message]]:
    header = router_pb2.PushWeightsHeader(
        policy_version=1, pause_mode=engine_pb2.PAUSE_MODE_KEEP, safetensors_bytes=8, model=model
    )
    hello = router_pb2.ReplicaHello(
        replica_id="fuzz",
        kind=router_pb2.REPLICA_KIND_SIDECAR,
        address="127.0.0.1:9",
        model=model,
        lease_capacity=1,
    )
    acquire = leases_pb2.AcquireLease(lease_id="l", session_id="s", wait_ms=100)
    return {
        "Register": [
            members_pb2.RegisterRequest(hello=hello),
            members_pb2.RegisterRequest(load=router_pb2.ReplicaLoad(running=1)),
        ],
        "Dispatch": [
            leases_pb2.DispatchRequest(
                hello=leases_pb2.DispatchHello(gateway_id="fuzz", model=model)
            ),
            leases_pb2.DispatchRequest(acquire=acquire),
            leases_pb2.DispatchRequest(releases=[leases_pb2.ReleaseLease(lease_id="l")]),
        ],
        "Attach": [
            tunnels_pb2.AttachRequest(caller_id="fuzz"),
            tunnels_pb2.AttachRequest(
                frame=tunnels_pb2.TunnelFrame(connection=1, data=b"\0" * 8, consumed=8)
            ),
        ],
        "PushWeights": [
            router_pb2.PushWeightsRequest(header=header),
            router_pb2.PushWeightsRequest(safetensors_chunk=b"\0" * 4),
        ],
        "PushAdapter": [
            router_pb2.PushAdapterRequest(header=_adapter(model)),
            router_pb2.PushAdapterRequest(safetensors_chunk=b"\0" * 8),
        ],
        "PlaceSession": [router_pb2.PlaceSessionRequest(model=model)],
    }


def _collector(session: Session) -> dict[str, Sequence[Message]]:
    hello = collector_pb2.SubscribeHello(consumer=CONSUMER)
    consumer = collector_pb2.Consumer(
        name=CONSUMER, unit=collector_pb2.DELIVERY_UNIT_GROUP, lease_ms=1000
    )
    acknowledge = collector_pb2.AcknowledgeDeliveries(delivery_ids=[session.session_id])
    rewards = session_pb2.SessionRewards(reward=1.0, turn_rewards={2: 0.5})
    return {
        "Ingest": [collector_pb2.IngestRequest(sessions=[record("fuzz-1"), record("fuzz-2", "g")])],
        "CreateConsumer": [collector_pb2.CreateConsumerRequest(consumer=consumer)],
        "UpdateConsumer": [collector_pb2.UpdateConsumerRequest(consumer=consumer)],
        "GetConsumer": [collector_pb2.GetConsumerRequest(consumer=CONSUMER)],
        "Subscribe": [
            collector_pb2.SubscribeRequest(hello=hello),
            collector_pb2.SubscribeRequest(grant=collector_pb2.GrantCredits(credits=2)),
            collector_pb2.SubscribeRequest(acknowledge=acknowledge),
        ],
        "SetRewards": [
            collector_pb2.SetRewardsRequest(session_id=session.session_id, rewards=rewards)
        ],
    }
