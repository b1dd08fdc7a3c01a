"""Settings of the router."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rollmesh.router.engines import IMBALANCE_MARGIN
from rollmesh.router.leases import QUEUE_LIMIT
from rollmesh.runtime.config import ROUTER_PORT, Bounds, ConfigError
from rollmesh.runtime.rpc import Port, ServerConfig


@dataclass(frozen=True, kw_only=True)
class RouterConfig(ServerConfig):
    """Settings of a router."""

    port: Port = ROUTER_PORT
    """Port to listen on. 0 takes a free one."""
    data_dir: Path = Path("var/router")
    """Folder where accepted weights are kept, by model, for engines that join later."""
    peers: str = ""
    """host:port of the other routers, separated by commas. All of them keep the same weights. The
    router's own address may be among them (`advertise`, or `host` and `port`), so that all routers
    can be given the same list."""
    control_timeout_ms: Annotated[int, Bounds(1)] = 600_000
    """Timeout of a control call to one engine, milliseconds."""
    gather_ms: Annotated[int, Bounds(0)] = 2_000
    """Time after its start in which engines register again, milliseconds. Control calls wait for
    its end, so that they reach all of them. So does a push of a model that is not registered."""
    push_silence_ms: Annotated[int, Bounds(1)] = 30_000
    """Longest wait for the next chunk of a push, milliseconds."""
    max_adapter_lag: Annotated[int, Bounds(0)] = 3
    """Number of revisions of an adapter that are retained below its newest one. Older revisions are
    unloaded from all engines when no open session names them any more."""
    adapter_shares: str = ""
    """Largest share of the leases of each engine that turns of an adapter hold at once, such as
    "planner=0.5 coder=0.25". Other adapters and the base model have no limit."""
    missed_reports: Annotated[int, Bounds(2)] = 5
    """Number of reports that a member may miss before it is removed. Engines and gateways report
    every second."""
    max_version_step: Annotated[int, Bounds(1)] = 1_000_000
    """Largest step of the policy version from one push to the next. A larger step is refused as a
    mistake, because no lower version could be pushed after it."""
    pin_ms: Annotated[int, Bounds(1)] = 10_000
    """Time after which a pin of weights ends that its evaluation does not renew, milliseconds."""
    max_pin_ms: Annotated[int, Bounds(1)] = 3_600_000
    """Longest time for which an evaluation pins weights, so that pushes wait, milliseconds."""
    imbalance_margin: Annotated[int, Bounds(0)] = IMBALANCE_MARGIN
    """Sessions leave an engine, and siblings of a group do not join it, if it has more than 1.5
    times the mean number of sessions and at least this many more than the mean."""
    queue_limit: Annotated[int, Bounds(0)] = QUEUE_LIMIT
    """Maximum number of requests that wait for a lease. Further ones are refused."""
    circuit_losses: Annotated[int, Bounds(1)] = 3
    """Turns that gateways lose in a row on an engine before it gets no leases for a while."""
    circuit_first_ms: Annotated[int, Bounds(1)] = 1_000
    """The first such while, milliseconds. It doubles each time the engine is tried in vain."""
    circuit_longest_ms: Annotated[int, Bounds(1)] = 60_000
    """The longest such while, milliseconds."""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            ConfigError: A setting is out of its bounds, or is no list of shares.
        """
        super().__post_init__()
        self.shares()

    def shares(self) -> dict[str, float]:
        """Returns the shares of adapters, above 0 and at most 1, by name.

        Raises:
            ConfigError: The setting is no list of shares.
        """
        shares: dict[str, float] = {}
        for entry in self.adapter_shares.split():
            name, _, share = entry.rpartition("=")
            try:
                shares[name] = float(share)
            except ValueError:
                shares[name] = 0.0
            if not name or not 0 < shares[name] <= 1:
                raise ConfigError(
                    f"adapter_shares: {entry!r} is no share; give NAME=SHARE, with a share above 0 "
                    "and at most 1"
                )
        return shares
