"""The door of `rollmesh.engine`: its names for other rooms and tests."""

from rollmesh.engine.adapters import Adapters as Adapters, read_config as read_config
from rollmesh.engine.attached.sglang import SglangAnswer as SglangAnswer
from rollmesh.engine.backend import (
    NO_ID as NO_ID,
    Adapter as Adapter,
    GenerateInput as GenerateInput,
    ModelLimits as ModelLimits,
    ScoreInput as ScoreInput,
    Scores as Scores,
    Transfer as Transfer,
    aborted as aborted,
)
from rollmesh.engine.checkpoints import (
    Header as Header,
    apply as apply,
    find_fault as find_fault,
    find_misfit as find_misfit,
    read_headers as read_headers,
)
from rollmesh.engine.config import EngineConfig as EngineConfig
from rollmesh.engine.control import (
    Action as Action,
    Control as Control,
    ControlState as ControlState,
    Held as Held,
)
from rollmesh.engine.generations import Generations as Generations
from rollmesh.engine.requests import (
    check_constraint as check_constraint,
    most_optional as most_optional,
    read_generate as read_generate,
    read_init as read_init,
    read_score as read_score,
    read_transfer as read_transfer,
)
from rollmesh.engine.scripted import (
    ScriptedBackend as ScriptedBackend,
    scripted_experts as scripted_experts,
)
from rollmesh.engine.service import (
    EngineService as EngineService,
    EngineServicer as EngineServicer,
    make_backend as make_backend,
)
