"""The door of `rollmesh.runtime`: its names for other rooms and tests."""

from rollmesh.runtime.alarms import (
    STEP_RULES as STEP_RULES,
    WINDOW as WINDOW,
    Rule as Rule,
    alarms_of as alarms_of,
)
from rollmesh.runtime.bounded import ByteCache as ByteCache, FairSlots as FairSlots
from rollmesh.runtime.database import (
    Database as Database,
    Row as Row,
    SqliteStatements as SqliteStatements,
    Statements as Statements,
)
from rollmesh.runtime.in_flight import BytesInFlight as BytesInFlight, HeldRequest as HeldRequest
from rollmesh.runtime.mesh_alarms import (
    ALARM_RULES as ALARM_RULES,
    MESH_RULES as MESH_RULES,
    METRICS as METRICS,
    Alarm as Alarm,
    AlarmLimits as AlarmLimits,
    Labels as Labels,
    Observation as Observation,
    Server as Server,
    raised as raised,
)
from rollmesh.runtime.mesh_file import (
    MODEL_SERVICES as MODEL_SERVICES,
    MOST_GPUS as MOST_GPUS,
    MOST_REPLICAS as MOST_REPLICAS,
    SERVICES as SERVICES,
    MeshConfig as MeshConfig,
    MeshModel as MeshModel,
    Table as Table,
    Tables as Tables,
    from_file as from_file,
    mesh_config as mesh_config,
    mesh_models as mesh_models,
    mesh_problems as mesh_problems,
    own_table as own_table,
    read_mesh as read_mesh,
    read_toml as read_toml,
    shared_settings as shared_settings,
)
from rollmesh.runtime.owner_only import (
    UMASK as UMASK,
    make_file as make_file,
    make_folder as make_folder,
)
from rollmesh.runtime.postgres import (
    Connection as Connection,
    Lane as Lane,
    Limits as Limits,
    prepare_database as prepare_database,
    read_address as read_address,
)
from rollmesh.runtime.probe import PORTS as PORTS
from rollmesh.runtime.runs import (
    MOST_ANCESTORS as MOST_ANCESTORS,
    STRIDE as STRIDE,
    belongs as belongs,
    check_current as check_current,
    check_run as check_run,
    is_stale as is_stale,
    number_of as number_of,
    opened as opened,
    run_of as run_of,
    start_of as start_of,
    told as told,
    version_of as version_of,
)
from rollmesh.runtime.tasks import (
    Background as Background,
    Backoff as Backoff,
    begun as begun,
    contained as contained,
    first_of as first_of,
    stopped as stopped,
)
from rollmesh.runtime.tokenizer_files import tokenizer_sha256 as tokenizer_sha256
from rollmesh.runtime.words import (
    EXCLUDING as EXCLUDING,
    REASONS as REASONS,
    RULES as RULES,
    SHAPES as SHAPES,
    SOURCES as SOURCES,
    label_of as label_of,
    label_words as label_words,
    line_of as line_of,
    mask_words as mask_words,
    printable as printable,
    told_reasons as told_reasons,
    why as why,
    words_of as words_of,
)
