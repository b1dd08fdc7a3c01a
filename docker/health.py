"""Exits 0 where the gRPC server on a port of this container serves: `python3 health.py 7100`."""

import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 5


def main() -> None:
    """Takes the port from the command line."""
    with grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}") as channel:
        probe: Any = health_pb2_grpc.HealthStub(channel)
        try:
            status = probe.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S).status
        except grpc.RpcError as error:
            sys.exit(f"no answer: {error}")
    if status != health_pb2.HealthCheckResponse.SERVING:
        sys.exit(health_pb2.HealthCheckResponse.ServingStatus.Name(status))


if __name__ == "__main__":
    main()
