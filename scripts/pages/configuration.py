"""Generates docs/configuration.md from the settings of the services.

python -m scripts.pages.configuration > docs/configuration.md
"""

import sys
from collections.abc import Mapping
from typing import Any

from rollmesh.collector.config import CollectorConfig
from rollmesh.engine.config import EngineConfig
from rollmesh.gateway.config import GatewayConfig
from rollmesh.router.config import RouterConfig
from rollmesh.runtime.config import Setting, describe
from rollmesh.scorer.config import ScorerConfig
from rollmesh.sidecar.config import SidecarConfig

CONFIGS: Mapping[str, type[Any]] = {
    "router": RouterConfig,
    "engine": EngineConfig,
    "gateway": GatewayConfig,
    "collector": CollectorConfig,
    "sidecar": SidecarConfig,
    "scorer": ScorerConfig,
}
_INTRO = """# Configuration

Every service reads its settings from four places: a flag wins over an environment variable, that
over a TOML file (`--config`), and that over the default. `rollmesh SERVICE --help` prints the same
list.

| setting `max_sessions` of the gateway | is written |
|---|---|
| flag | `--max-sessions=1000` |
| environment variable | `ROLLMESH_GATEWAY_MAX_SESSIONS=1000` |
| file for `rollmesh gateway --config` | `max_sessions = 1000` |
| file for `rollmesh up --config` | `max_sessions = 1000` under `[gateway]` |

Every variable is `ROLLMESH_`, the service and the setting's name, in capitals. Times are in
milliseconds and sizes in bytes, as the names say. `[mesh]` in the file of `rollmesh up` holds what
the services share: [operations](operations.md#on-one-machine).
"""
_HEAD = "| flag | type | default | allowed | meaning |\n|---|---|---|---|---|\n"


def page() -> str:
    """Returns the page."""
    return _INTRO + "".join(_section(name, config) for name, config in CONFIGS.items())


def _section(service: str, config: type[Any]) -> str:
    rows = "".join(_row(setting) for setting in describe(config, service))
    return f"\n## {service.capitalize()}\n\n{_HEAD}{rows}"


def _row(setting: Setting) -> str:
    default = "" if setting.default in ("", {}) else f"`{setting.default}`"
    allowed = str(setting.bound) if setting.bound is not None else ""
    cells = (
        f"`{setting.flag}`",
        setting.kind.__name__,
        default,
        allowed,
        setting.doc.replace("|", "\\|").replace("<", "\\<"),
    )
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
