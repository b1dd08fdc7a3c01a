from contextlib import aclosing

from starlette.routing import Route

from rollmesh.mesh.directories.gateways import GatewayDirectory
from rollmesh.sidecar.app import make_app
from rollmesh.sidecar.config import SidecarConfig
from rollmesh.sidecar.routes import TABLE, prefixes


async def served(config: SidecarConfig) -> set[str]:
    async with aclosing(GatewayDirectory(config.router, config.gateway)) as directory:
        routes = make_app(config, directory).routes
    assert all(type(route) is Route for route in routes)
    return {
        f"{method} {route.path}"
        for route in routes
        if isinstance(route, Route)
        for method in (route.methods or {"ANY"}) - {"HEAD"}
    }


async def test_the_table_has_every_route_and_no_other() -> None:
    for prefix in ("", "/agents"):
        expected = {
            f"{name.replace(' ', f' {before}')}" for name in TABLE for before in prefixes(prefix)
        }
        assert await served(SidecarConfig(path_prefix=prefix)) == expected
    assert len(TABLE) == 10
