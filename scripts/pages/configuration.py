"""Generates docs/configuration.md from the settings of the services.

python -m scripts.pages.configuration > docs/configuration.md
"""

import sys
from collections.abc import Mapping
from typing import Any

from rollmesh.collector import CollectorConfig
from rollmesh.engine import EngineConfig
from rollmesh.gateway import GatewayConfig
from rollmesh.router import RouterConfig
from rollmesh.runtime import MeshConfig
from rollmesh.runtime.config import Setting, describe
from rollmesh.scorer import ScorerConfig
from rollmesh.sidecar import RelayConfig, SidecarConfig

CONFIGS: Mapping[str, type[Any]] = {
    "router": RouterConfig,
    "engine": EngineConfig,
    "gateway": GatewayConfig,
    "collector": CollectorConfig,
    "sidecar": SidecarConfig,
    "relay": RelayConfig,
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
| file (`--config`) | `max_sessions = 1000` under `[gateway]` |

Every variable is `ROLLMESH_`, the service and the setting's name, in capitals. Times are in
milliseconds and sizes in bytes, as the names say.

One file serves all: `rollmesh up --config mesh.toml` and `rollmesh SERVICE --config mesh.toml` read
the same one. A service takes its own table and what `[mesh]` shares; its table has more weight.
[Operations](operations.md#one-file) has an example. A flag with a password or a token is refused,
because `ps` shows it: write it into the file or the environment.
"""
_KEYS = "| key | type | default | allowed | meaning |\n|---|---|---|---|---|\n"
_HEAD = "| flag | type | default | allowed | meaning |\n|---|---|---|---|---|\n"


def page() -> str:
    """Returns the page."""
    sections = "".join(_section(name, config) for name, config in CONFIGS.items())
    return f"{_INTRO}{_mesh()}{sections}"


def _mesh() -> str:
    """Returns the section of what all share, which no flag and no variable sets."""
    rows = "".join(_row(setting, setting.name) for setting in describe(MeshConfig, "mesh"))
    text = "Keys of `[mesh]`. They are no flags and no variables."
    traces = (
        "The keys of `[traces]` are the settings `traces_*` of all services, without the prefix."
    )
    return f"\n## Mesh\n\n{text}\n\n{_KEYS}{rows}\n{traces}\n"


def _section(service: str, config: type[Any]) -> str:
    rows = "".join(_row(setting, setting.flag) for setting in describe(config, service))
    return f"\n## {service.capitalize()}\n\n{_HEAD}{rows}"


def _row(setting: Setting, name: str) -> str:
    default = "" if setting.default in ("", {}) else f"`{setting.default}`"
    allowed = str(setting.bound) if setting.bound is not None else ""
    cells = (
        f"`{name}`",
        setting.kind.__name__,
        default,
        allowed,
        setting.doc.replace("|", "\\|").replace("<", "\\<"),
    )
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    sys.stdout.write(page())
