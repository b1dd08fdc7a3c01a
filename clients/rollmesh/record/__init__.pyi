"""The door of `rollmesh.record`: its names for other rooms and tests."""

from rollmesh.record.atif import (
    Decode as Decode,
    documents_of as documents_of,
    facts_of as facts_of,
    ids_of as ids_of,
    leaves_as_result as leaves_as_result,
    write_documents as write_documents,
)
from rollmesh.record.beside import name_of as name_of
from rollmesh.record.evals import write_log as write_log
from rollmesh.record.files import (
    PARTS as PARTS,
    Writer as Writer,
    read_annotations as read_annotations,
    read_records as read_records,
    read_rewards as read_rewards,
    read_session as read_session,
    read_stored as read_stored,
    read_tables as read_tables,
)
from rollmesh.record.late import LATE_TABLES as LATE_TABLES
from rollmesh.record.otel import (
    send_spans as send_spans,
    spans_of as spans_of,
    write_spans as write_spans,
)
from rollmesh.record.reading import read_sessions as read_sessions
from rollmesh.record.rows import (
    decoder as decoder,
    rows_of as rows_of,
    sft_rows_of as sft_rows_of,
    write_rows as write_rows,
)
from rollmesh.record.schema import TABLES as TABLES, Column as Column
from rollmesh.record.tables import Tables as Tables, record_of as record_of, tables_of as tables_of
