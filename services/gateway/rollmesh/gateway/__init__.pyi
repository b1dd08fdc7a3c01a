"""The door of `rollmesh.gateway`: its names for other rooms and tests."""

from rollmesh.gateway.commands import TOOLS as TOOLS, run_tool as run_tool
from rollmesh.gateway.config import GatewayConfig as GatewayConfig
from rollmesh.gateway.conversation import (
    Conversation as Conversation,
    MessageReader as MessageReader,
)
from rollmesh.gateway.deps import FairExecutor as FairExecutor, new_tree as new_tree
from rollmesh.gateway.export import (
    blobs_of as blobs_of,
    check_close as check_close,
    export_tree as export_tree,
    export_turns as export_turns,
    exported_lineages as exported_lineages,
    pack_tree as pack_tree,
    serialize as serialize,
    write_head as write_head,
)
from rollmesh.gateway.journal import (
    SQLITE_SCHEMA as SQLITE_SCHEMA,
    VERSION as VERSION,
    Journal as Journal,
    ModelFiles as ModelFiles,
    Transaction as Transaction,
    adopt_model as adopt_model,
    insert_sent as insert_sent,
    insert_session as insert_session,
    insert_turn as insert_turn,
    open_sqlite as open_sqlite,
    read_image_bytes as read_image_bytes,
    read_images as read_images,
    read_next_image as read_next_image,
    read_open as read_open,
    read_revisions as read_revisions,
    read_session as read_session,
)
from rollmesh.gateway.lineage import RULES as RULES
from rollmesh.gateway.outbox import (
    MOST_FAILURES as MOST_FAILURES,
    Letter as Letter,
    Outbox as Outbox,
    close_session as close_session,
    count_undelivered as count_undelivered,
    give_up as give_up,
    read_closes as read_closes,
    set_aside as set_aside,
    stored_close as stored_close,
    sweep as sweep,
    write_letters as write_letters,
)
from rollmesh.gateway.postgres import (
    PostgresJournals as PostgresJournals,
    ServedModel as ServedModel,
    open_postgres as open_postgres,
)
from rollmesh.gateway.prompt import (
    Prompt as Prompt,
    build_prompt as build_prompt,
    least_tokens as least_tokens,
)
from rollmesh.gateway.registry import (
    ChatCall as ChatCall,
    GroupSizes as GroupSizes,
    Registry as Registry,
    SentAnswers as SentAnswers,
    SessionKeys as SessionKeys,
)
from rollmesh.gateway.requests import (
    choice_seed as choice_seed,
    read_choices as read_choices,
    turn_sampling as turn_sampling,
)
from rollmesh.gateway.responses import (
    write_finding as write_finding,
    write_kind as write_kind,
    write_nodes as write_nodes,
    write_reasoning as write_reasoning,
    write_template as write_template,
    write_tokens as write_tokens,
    write_tool_calls as write_tool_calls,
)
from rollmesh.gateway.service import GatewayService as GatewayService
from rollmesh.gateway.session import (
    AnswerReceipt as AnswerReceipt,
    EqualTurns as EqualTurns,
    Session as Session,
    SessionSpec as SessionSpec,
    Shared as Shared,
    Turn as Turn,
    TurnRequest as TurnRequest,
)
from rollmesh.gateway.tenancy import Gateway as Gateway
from rollmesh.gateway.tree import (
    Edge as Edge,
    Fidelity as Fidelity,
    Finish as Finish,
    Lineage as Lineage,
    Match as Match,
    Node as Node,
    Sample as Sample,
    Tree as Tree,
    new_root as new_root,
    path_bytes as path_bytes,
)
from rollmesh.gateway.turn import Draft as Draft, sample_of as sample_of
from rollmesh.gateway.vllm_parser import VllmParser as VllmParser
