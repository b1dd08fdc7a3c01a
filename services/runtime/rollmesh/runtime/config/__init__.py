"""Settings of every process: one frozen dataclass per service, one TOML file for all of them.

The field `max_nodes: Annotated[int, Bounds(1)] = 7` is the flag `--max-nodes`, the variable
`ROLLMESH_<SERVICE>_MAX_NODES` and the key `max_nodes` of the service's table in the file. Flags win
over the environment, the environment over the file, the file over the default. The docstring under
a field is its help. Import from this package, whose modules may import nothing else.
"""

from rollmesh.runtime.config.mesh_file import (
    LOCAL_ROUTER,
    ROUTER_PORT,
    SCORER_PORT,
    SERVICES,
    MeshConfig,
    Tables,
    mesh_config,
    mesh_models,
    mesh_problems,
    own_table,
    read_file,
    read_mesh,
    shared_settings,
)
from rollmesh.runtime.config.models import (
    MODEL_SERVICES,
    MOST_GPUS,
    MOST_REPLICAS,
    MeshModel,
    ModelConfig,
    Table,
)
from rollmesh.runtime.config.secrets import has_secret, masked
from rollmesh.runtime.config.settings import (
    Bound,
    Bounds,
    Config,
    ConfigError,
    OneOf,
    Setting,
    describe,
    examine,
    fill,
)
from rollmesh.runtime.config.sources import (
    DEFAULT,
    Given,
    Resolved,
    from_environment,
    from_file,
    parse_config,
    resolve,
)

__all__ = [
    "DEFAULT",
    "LOCAL_ROUTER",
    "MODEL_SERVICES",
    "MOST_GPUS",
    "MOST_REPLICAS",
    "ROUTER_PORT",
    "SCORER_PORT",
    "SERVICES",
    "Bound",
    "Bounds",
    "Config",
    "ConfigError",
    "Given",
    "MeshConfig",
    "MeshModel",
    "ModelConfig",
    "OneOf",
    "Resolved",
    "Setting",
    "Table",
    "Tables",
    "describe",
    "examine",
    "fill",
    "from_environment",
    "from_file",
    "has_secret",
    "masked",
    "mesh_config",
    "mesh_models",
    "mesh_problems",
    "own_table",
    "parse_config",
    "read_file",
    "read_mesh",
    "resolve",
    "shared_settings",
]
