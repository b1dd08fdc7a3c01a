"""Schema of the SQLite store. Totals are kept in tables, so that no hot path counts rows."""

VERSION = 7  # incremented with every change of the schema or of `records.split`
PAGE_BYTES = 16_384  # a trajectory of 10,000 tokens takes 90 KB
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
  n INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL UNIQUE, group_key TEXT NOT NULL,
  sample_index INTEGER NOT NULL, due_ms INTEGER, ready INTEGER NOT NULL DEFAULT 0,
  trajectories INTEGER NOT NULL, head BLOB NOT NULL,
  arrays BLOB, file INTEGER, at INTEGER, size INTEGER);
CREATE INDEX IF NOT EXISTS sessions_by_file ON sessions (file) WHERE file IS NOT NULL;
CREATE TABLE IF NOT EXISTS files (n INTEGER PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS sessions_by_group ON sessions (group_key);
CREATE INDEX IF NOT EXISTS sessions_due ON sessions (due_ms) WHERE due_ms IS NOT NULL;
CREATE TABLE IF NOT EXISTS groups (
  n INTEGER PRIMARY KEY, group_key TEXT NOT NULL UNIQUE, size INTEGER NOT NULL,
  first_ms INTEGER NOT NULL, open INTEGER NOT NULL DEFAULT 1);
CREATE INDEX IF NOT EXISTS groups_open ON groups (n) WHERE open;
CREATE TABLE IF NOT EXISTS group_deadlines (
  log TEXT NOT NULL, group_key TEXT NOT NULL, due_ms INTEGER NOT NULL,
  PRIMARY KEY (log, group_key)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS group_deadlines_due ON group_deadlines (due_ms);
CREATE TABLE IF NOT EXISTS units (
  log TEXT NOT NULL, seq INTEGER NOT NULL, unit_id TEXT NOT NULL, members TEXT NOT NULL,
  partial INTEGER NOT NULL, made_ms INTEGER NOT NULL,
  PRIMARY KEY (log, seq), UNIQUE (log, unit_id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS units_by_time ON units (log, made_ms, seq);
CREATE TABLE IF NOT EXISTS consumers (
  name TEXT PRIMARY KEY, log TEXT NOT NULL, settings BLOB NOT NULL, start_seq INTEGER NOT NULL,
  floor INTEGER NOT NULL, settled INTEGER NOT NULL, acknowledged INTEGER NOT NULL DEFAULT 0,
  seen_ms INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS progress (
  consumer TEXT NOT NULL, unit_id TEXT NOT NULL, attempts INTEGER NOT NULL, settled_ms INTEGER,
  PRIMARY KEY (consumer, unit_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS filtered (
  n INTEGER PRIMARY KEY AUTOINCREMENT, owner TEXT NOT NULL, unit_id TEXT NOT NULL,
  entry BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS filtered_by_owner ON filtered (owner, n);
CREATE INDEX IF NOT EXISTS filtered_by_unit ON filtered (unit_id);
CREATE TABLE IF NOT EXISTS filtered_counts (
  owner TEXT NOT NULL, reason INTEGER NOT NULL, units INTEGER NOT NULL,
  trajectories INTEGER NOT NULL, PRIMARY KEY (owner, reason)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reward_requests (
  session_id TEXT NOT NULL, request_id TEXT NOT NULL, digest BLOB NOT NULL,
  PRIMARY KEY (session_id, request_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS removed (
  id TEXT PRIMARY KEY, removed_ms INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS removed_by_time ON removed (removed_ms);
CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""
