"""Tables of the SQL stores. Totals are kept in a table, so that no hot path counts rows."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS identity (store_id {text} NOT NULL);
CREATE TABLE IF NOT EXISTS sessions (
  n {key}, session_id {text} NOT NULL UNIQUE, group_key {text} NOT NULL,
  sample_index BIGINT NOT NULL, due_ms BIGINT, ready BIGINT NOT NULL DEFAULT 0,
  trajectories BIGINT NOT NULL, head {blob} NOT NULL, arrays {blob}{of_sessions});
CREATE INDEX IF NOT EXISTS sessions_by_group ON sessions (group_key);
CREATE INDEX IF NOT EXISTS sessions_due ON sessions (due_ms) WHERE due_ms IS NOT NULL;
CREATE TABLE IF NOT EXISTS groups (
  n {key}, group_key {text} NOT NULL UNIQUE, size BIGINT NOT NULL,
  first_ms BIGINT NOT NULL, open BIGINT NOT NULL DEFAULT 1);
CREATE INDEX IF NOT EXISTS groups_waiting ON groups (n) WHERE open = 1;
CREATE TABLE IF NOT EXISTS group_deadlines (
  log {text} NOT NULL, group_key {text} NOT NULL, due_ms BIGINT NOT NULL,
  PRIMARY KEY (log, group_key)){by_key};
CREATE INDEX IF NOT EXISTS group_deadlines_due ON group_deadlines (due_ms);
CREATE TABLE IF NOT EXISTS units (
  log {text} NOT NULL, seq BIGINT NOT NULL, unit_id {text} NOT NULL, members {text} NOT NULL,
  partial BIGINT NOT NULL, made_ms BIGINT NOT NULL,
  PRIMARY KEY (log, seq), UNIQUE (log, unit_id)){by_key};
CREATE INDEX IF NOT EXISTS units_by_time ON units (log, made_ms, seq);
CREATE TABLE IF NOT EXISTS consumers (
  name {text} PRIMARY KEY, log {text} NOT NULL, settings {blob} NOT NULL, start_seq BIGINT NOT NULL,
  floor BIGINT NOT NULL, settled BIGINT NOT NULL, acknowledged BIGINT NOT NULL DEFAULT 0,
  seen_ms BIGINT NOT NULL{of_consumers});
CREATE TABLE IF NOT EXISTS progress (
  consumer {text} NOT NULL, unit_id {text} NOT NULL, attempts BIGINT NOT NULL, settled_ms BIGINT
  {of_progress}, PRIMARY KEY (consumer, unit_id)){by_key};
CREATE TABLE IF NOT EXISTS filtered (
  n {key}, owner {text} NOT NULL, unit_id {text} NOT NULL, entry {blob} NOT NULL);
CREATE INDEX IF NOT EXISTS filtered_by_owner ON filtered (owner, n);
CREATE INDEX IF NOT EXISTS filtered_by_unit ON filtered (unit_id);
CREATE TABLE IF NOT EXISTS filtered_counts (
  owner {text} NOT NULL, reason BIGINT NOT NULL, units BIGINT NOT NULL,
  trajectories BIGINT NOT NULL, PRIMARY KEY (owner, reason)){by_key};
CREATE TABLE IF NOT EXISTS reward_requests (
  session_id {text} NOT NULL, request_id {text} NOT NULL, digest {blob} NOT NULL,
  PRIMARY KEY (session_id, request_id)){by_key};
CREATE TABLE IF NOT EXISTS removed (
  id {text} PRIMARY KEY, removed_ms BIGINT NOT NULL){by_key};
CREATE INDEX IF NOT EXISTS removed_by_time ON removed (removed_ms);
CREATE TABLE IF NOT EXISTS totals (name {text} PRIMARY KEY, value BIGINT NOT NULL){by_key};
"""
"""Statements with the types of a dialect, and the columns that only one of them has, left open."""
