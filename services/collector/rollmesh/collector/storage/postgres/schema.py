"""The tables of `storage.sql` in PostgreSQL, and those of the collectors that share them.

Arrays are not compressed: token ids and log-probabilities do not shrink.
"""

from rollmesh.collector.storage.sql import schema

VERSION = 3
"""Version of the tables; incremented with every change of them, or of `records.split`."""
SCHEMA = (
    schema.SCHEMA.format(
        key="BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
        text='TEXT COLLATE "C"',
        blob="BYTEA",
        by_key="",
        of_sessions=", scorer TEXT",
        of_consumers=", moved_at BIGINT NOT NULL DEFAULT 0, moved_by TEXT NOT NULL DEFAULT ''",
        of_progress=", holder TEXT",
    )
    + """
ALTER TABLE sessions ALTER COLUMN arrays SET STORAGE EXTERNAL;
CREATE INDEX IF NOT EXISTS progress_open ON progress (consumer) WHERE settled_ms IS NULL;
CREATE INDEX IF NOT EXISTS sessions_to_score ON sessions (due_ms)
  WHERE due_ms IS NOT NULL AND scorer IS NOT NULL;
CREATE TABLE IF NOT EXISTS duties (duty TEXT PRIMARY KEY, next_at TIMESTAMPTZ NOT NULL);
CREATE TABLE IF NOT EXISTS collectors (id TEXT PRIMARY KEY, alive_until TIMESTAMPTZ NOT NULL);
"""
)
