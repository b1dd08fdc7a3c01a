"""The gRPC services that each process of a mesh serves."""

from google.protobuf.descriptor import ServiceDescriptor

from rollmesh.internal.v1 import leases_pb2, members_pb2, peers_pb2, tunnels_pb2
from rollmesh.v1 import collector_pb2, engine_pb2, gateway_admin_pb2, gateway_pb2, router_pb2

SERVED: dict[str, tuple[ServiceDescriptor, ...]] = {
    process: tuple(one for file in files for one in file.DESCRIPTOR.services_by_name.values())
    for process, files in (
        ("router", (router_pb2, members_pb2, leases_pb2, peers_pb2, tunnels_pb2)),
        ("engine", (engine_pb2,)),
        ("gateway", (gateway_pb2, gateway_admin_pb2, tunnels_pb2)),
        ("collector", (collector_pb2,)),
    )
}
