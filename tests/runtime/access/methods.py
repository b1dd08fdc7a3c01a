"""Every method that a service of rollmesh serves, from the descriptors of its services."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module

from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import rollmesh.internal.v1
import rollmesh.v1


def methods() -> dict[str, MethodDescriptor]:
    """Returns the methods of all services by their full names, as gRPC has them."""
    return {
        f"/{method.containing_service.full_name}/{method.name}": method for method in _methods()
    }


def _methods() -> Iterator[MethodDescriptor]:
    modules = [
        import_module(f"{package.__name__}.{module.name}")
        for package in (rollmesh.v1, rollmesh.internal.v1)
        for module in pkgutil.iter_modules(package.__path__)
        if module.name.endswith("_pb2")
    ]
    for module in (*modules, health_pb2, reflection_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from service.methods
