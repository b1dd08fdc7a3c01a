"""`rollmesh router forget-weights`: how an operator undoes a push with a wrong version."""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from rollmesh.mesh.router_calls import Routers
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.rpc.channels import typed_errors
from rollmesh.v1 import router_pb2

FORGET = "forget-weights"
_TIMEOUT_S = 60.0


def forget_weights(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, 1 after an error, 2 for a bad flag."""
    parser = argparse.ArgumentParser(
        prog=f"rollmesh router {FORGET}",
        description="Makes a router forget the pushed weights, so that the next push may have any "
        "version. Engines keep their weights until then.",
    )
    parser.add_argument("--router", default="127.0.0.1:7100", help="host:port of the routers")
    parser.add_argument("--model", default="", help="name of the model, if there are several")
    options = parser.parse_args(argv)
    try:
        response = asyncio.run(_forget(options.router, options.model))
    except RollmeshError as error:
        print(f"rollmesh router {FORGET}: {error.message}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"{response.model}: forgot the weights of version {response.policy_version}")  # noqa: T201
    return 0


async def _forget(router: str, model: str) -> router_pb2.ForgetWeightsResponse:
    routers = Routers(router)
    try:
        stub = await routers.stub()
        with typed_errors():
            return await stub.ForgetWeights(
                router_pb2.ForgetWeightsRequest(model=model), timeout=_TIMEOUT_S
            )
    finally:
        await routers.aclose()
