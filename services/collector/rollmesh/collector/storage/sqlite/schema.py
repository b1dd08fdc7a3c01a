"""The tables of `storage.sql` in SQLite, and those of the array files."""

from rollmesh.collector.storage.sql import schema

VERSION = 8  # incremented with every change of the schema or of `records.split`
PAGE_BYTES = 16_384  # a trajectory of 10,000 tokens takes 90 KB
SCHEMA = (
    schema.SCHEMA.format(
        key="INTEGER PRIMARY KEY AUTOINCREMENT",
        text="TEXT",
        blob="BLOB",
        by_key=" WITHOUT ROWID",
        of_sessions=", file INTEGER, at INTEGER, size INTEGER",
        of_consumers="",
        of_progress="",
    )
    + """
CREATE INDEX IF NOT EXISTS sessions_by_file ON sessions (file) WHERE file IS NOT NULL;
CREATE TABLE IF NOT EXISTS files (n INTEGER PRIMARY KEY, bytes INTEGER NOT NULL);
"""
)
