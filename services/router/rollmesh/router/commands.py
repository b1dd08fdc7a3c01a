"""`rollmesh router forget-weights`: how an operator undoes a push with a wrong version."""

import argparse
import uuid
from collections.abc import Mapping, Sequence
from functools import partial

from rollmesh.mesh import Routers
from rollmesh.runtime.access import identity
from rollmesh.runtime.config import LOCAL_ROUTER
from rollmesh.v1 import router_pb2

_TIMEOUT_S = 60.0
_REPEATED_S = 10.0
"""Time within which the call is repeated. The caller may have mistyped an address."""


def forget_weights(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs the command and returns the exit code: 0, 1 after an error, 2 for a bad flag."""
    parser = argparse.ArgumentParser(
        prog="rollmesh router forget-weights",
        description="Makes a router forget the pushed weights, so that the next push may have any "
        "version. Engines keep their weights until then.",
    )
    parser.add_argument("--router", default=LOCAL_ROUTER, help="host:port of the routers")
    parser.add_argument("--model", default="", help="name of the model, if there are several")
    identity.add_flags(parser)
    options = parser.parse_args(argv)
    work = partial(_forget, options.router, options.model)
    return identity.run_tool(parser.prog, options, environ, work)


async def _forget(router: str, model: str) -> None:
    routers = Routers(router)
    request = router_pb2.ForgetWeightsRequest(model=model, request_id=uuid.uuid4().hex)
    try:
        response = await routers.repeat(
            lambda stub: stub.ForgetWeights(request, timeout=_TIMEOUT_S), _REPEATED_S
        )
    finally:
        await routers.aclose()
    print(f"{response.model}: forgot the weights of version {response.policy_version}")
