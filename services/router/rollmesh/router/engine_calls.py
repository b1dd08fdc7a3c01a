"""One control call to one engine, and its result."""

from collections.abc import Awaitable, Callable

from rollmesh.router.leasing.engines import Engine
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc.channels import open_channel, typed_errors
from rollmesh.runtime.rpc.statuses import to_status
from rollmesh.v1 import engine_pb2_grpc, router_pb2


async def call_engine(
    engine: Engine, call: Callable[["engine_pb2_grpc.EngineServiceAsyncStub"], Awaitable[object]]
) -> router_pb2.EngineResult:
    """Calls an engine and returns the result; a failed call also yields a result."""
    try:
        async with open_channel(engine.address) as channel:
            with typed_errors():
                await call(engine_pb2_grpc.EngineServiceStub(channel))
    except RollmeshError as error:
        return failed(engine, error)
    return router_pb2.EngineResult(engine_id=engine.engine_id)


def failed(engine: Engine, error: RollmeshError) -> router_pb2.EngineResult:
    """Returns the result of a failed call."""
    return router_pb2.EngineResult(engine_id=engine.engine_id, status=to_status(error))
