"""A trainer that reads from the collector with only grpcio and the generated stubs: no SDK.

    python examples/trainer_grpc_only.py HOST:PORT --groups 2

It reads complete groups, prints one JSON line, and acknowledges each group once it is safe. The
same steps work in any language with gRPC. `protos/rollmesh/v1/collector.proto` is the contract.
"""

import argparse
import json
import queue
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np

from rollmesh.v1 import collector_pb2, collector_pb2_grpc, session_pb2

_TIMEOUT_S = 120


def read_groups(
    address: str, consumer: str, count: int, token: str = ""
) -> list[list[session_pb2.SessionRecord]]:
    """Returns `count` groups, each durably acknowledged by the collector."""
    shown = (("authorization", f"Bearer {token}"),) if token else ()
    outgoing: queue.Queue[collector_pb2.SubscribeRequest | None] = queue.Queue()
    hello = collector_pb2.SubscribeHello(consumer=consumer)
    outgoing.put(collector_pb2.SubscribeRequest(hello=hello))
    grant = collector_pb2.GrantCredits(credits=count)
    outgoing.put(collector_pb2.SubscribeRequest(grant=grant))

    def requests() -> Iterator[collector_pb2.SubscribeRequest]:
        while (request := outgoing.get()) is not None:
            yield request

    groups: dict[str, list[session_pb2.SessionRecord]] = {}
    acknowledged = 0
    options = [("grpc.max_receive_message_length", -1)]  # a group may have any size
    with grpc.insecure_channel(address, options=options) as channel:
        stub = collector_pb2_grpc.CollectorServiceStub(channel)
        create_consumer(stub, consumer, shown)
        call = stub.Subscribe(requests(), timeout=_TIMEOUT_S, metadata=shown)
        for response in call:
            if response.HasField("delivery"):
                delivery = response.delivery
                groups[delivery.delivery_id] = list(delivery.sessions)  # replaced if redelivered
                safe = collector_pb2.AcknowledgeDeliveries(delivery_ids=[delivery.delivery_id])
                outgoing.put(collector_pb2.SubscribeRequest(acknowledge=safe))
            else:
                acknowledged += len(response.acknowledged.delivery_ids)
            if acknowledged >= count:
                break
        outgoing.put(None)
        call.cancel()
    return list(groups.values())


def create_consumer(
    stub: collector_pb2_grpc.CollectorServiceStub, name: str, shown: tuple[tuple[str, str], ...]
) -> None:
    """Creates a consumer of groups, unless it exists."""
    consumer = collector_pb2.Consumer(name=name, unit=collector_pb2.DELIVERY_UNIT_GROUP)
    request = collector_pb2.CreateConsumerRequest(consumer=consumer)
    try:
        stub.CreateConsumer(request, timeout=_TIMEOUT_S, metadata=shown)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
            raise


def summarise(groups: list[list[session_pb2.SessionRecord]]) -> dict[str, object]:
    """Returns the figures that a trainer would look at first."""
    tokens = trained = 0
    for sessions in groups:
        for session in sessions:
            for trajectory in session.trajectories:
                arrays = trajectory.tokens
                ids = np.frombuffer(arrays.token_ids_u32le, "<u4")
                mask = np.frombuffer(arrays.loss_mask_u8, np.bool_)
                logprobs = np.frombuffer(arrays.logprobs_f32le, "<f4")
                assert len(ids) == len(mask) == len(logprobs)
                tokens += len(ids)
                trained += int(mask.sum())
    rewards = [session.reward for sessions in groups for session in sessions]
    return {
        "groups": len(groups),
        "sessions": sum(map(len, groups)),
        "tokens": tokens,
        "trained_tokens": trained,
        "reward_mean": float(np.mean(rewards)),
    }


def main() -> None:
    """Parses the command line and prints a summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("collector", help="HOST:PORT")
    parser.add_argument("--consumer", default="grpc-only")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--token-file", type=Path, help="a trainer's; for a mesh that is locked")
    options = parser.parse_args()
    token = options.token_file.read_text().strip() if options.token_file else ""
    groups = read_groups(options.collector, options.consumer, options.groups, token)
    print(json.dumps(summarise(groups)))


if __name__ == "__main__":
    main()
