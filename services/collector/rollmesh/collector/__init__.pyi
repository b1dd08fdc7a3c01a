"""The door of `rollmesh.collector`: its names for other rooms and tests."""

from rollmesh.collector.commands import TOOLS as TOOLS, read_position as read_position
from rollmesh.collector.config import CollectorConfig as CollectorConfig
from rollmesh.collector.log import (
    ABANDONED as ABANDONED,
    SESSION_LOG as SESSION_LOG,
    Arrival as Arrival,
    Formed as Formed,
    Loaded as Loaded,
    Member as Member,
    Page as Page,
    Settlement as Settlement,
    Unit as Unit,
    Verdict as Verdict,
    counts_of as counts_of,
    entries_of as entries_of,
    form as form,
    join as join,
    judge as judge,
    judge_unit as judge_unit,
    key_of as key_of,
    log_of as log_of,
    read_head as read_head,
    run_and_group as run_and_group,
    split as split,
    tokens_of as tokens_of,
    trained_spans as trained_spans,
    turns_of as turns_of,
    usable as usable,
)
from rollmesh.collector.metrics import (
    ACKNOWLEDGED as ACKNOWLEDGED,
    DELIVERIES as DELIVERIES,
    LEASED as LEASED,
    READY as READY,
    count_filtered as count_filtered,
    forget as forget,
)
from rollmesh.collector.postgres import open_postgres as open_postgres
from rollmesh.collector.scoring import Teachers as Teachers
from rollmesh.collector.service import (
    CollectorService as CollectorService,
    open_store as open_store,
)
from rollmesh.collector.settings import (
    DEFAULT_LEASE_MS as DEFAULT_LEASE_MS,
    created as created,
    updated as updated,
)
from rollmesh.collector.sqlite import open_sqlite as open_sqlite
from rollmesh.collector.store import (
    LOAD_BYTES as LOAD_BYTES,
    Retention as Retention,
    Store as Store,
)
from rollmesh.collector.streams import (
    Consumer as Consumer,
    Stream as Stream,
    Subscriptions as Subscriptions,
)
