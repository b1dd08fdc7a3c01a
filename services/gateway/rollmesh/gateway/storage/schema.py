"""Tables of a journal in both dialects; a database may hold several journals."""

VERSION = 15
"""Incremented with every change of the tables and of the values in them."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
  n {key}, journal {text} NOT NULL, session_id {text} NOT NULL UNIQUE, request_id {text},
  spec {text} NOT NULL, UNIQUE (journal, request_id));
CREATE INDEX IF NOT EXISTS sessions_in_order ON sessions (journal, n);
CREATE TABLE IF NOT EXISTS contexts (
  journal {text} NOT NULL, context_key {blob} NOT NULL, tools_json {blob} NOT NULL,
  options_json {blob} NOT NULL, PRIMARY KEY (journal, context_key));
CREATE TABLE IF NOT EXISTS session_contexts (
  session_id {text} NOT NULL, context_key {blob} NOT NULL, journal {text} NOT NULL,
  PRIMARY KEY (session_id, context_key));
CREATE INDEX IF NOT EXISTS sessions_of_contexts ON session_contexts (journal, context_key);
CREATE TABLE IF NOT EXISTS nodes (
  n {key}, session_id {text} NOT NULL, node_id BIGINT NOT NULL, parent_id BIGINT NOT NULL,
  context_key {blob} NOT NULL, messages {text} NOT NULL, token_ids {blob} NOT NULL,
  scaffold BIGINT NOT NULL, reasons {text} NOT NULL, sample {text}, logprobs {blob}, tops {blob},
  answer {text}, images {text}, UNIQUE (session_id, node_id));
CREATE INDEX IF NOT EXISTS nodes_in_order ON nodes (session_id, n);
CREATE TABLE IF NOT EXISTS images (
  n {key}, session_id {text} NOT NULL, sha256 {text} NOT NULL, media_type {text} NOT NULL,
  width BIGINT NOT NULL, height BIGINT NOT NULL, data {blob} NOT NULL,
  UNIQUE (session_id, sha256));
CREATE TABLE IF NOT EXISTS sent (
  session_id {text} NOT NULL, node_id BIGINT NOT NULL, PRIMARY KEY (session_id, node_id)){by_key};
CREATE TABLE IF NOT EXISTS closes (
  journal {text} NOT NULL, n BIGINT NOT NULL, session_id {text} NOT NULL UNIQUE,
  request_id {text}, leaves {blob} NOT NULL, digest {blob} NOT NULL, PRIMARY KEY (journal, n));
CREATE INDEX IF NOT EXISTS closes_by_request ON closes (journal, request_id);
CREATE TABLE IF NOT EXISTS session_keys (
  session_id {text} PRIMARY KEY, journal {text} NOT NULL, revision BIGINT NOT NULL,
  request_id {text} NOT NULL);
CREATE INDEX IF NOT EXISTS session_keys_of_journals ON session_keys (journal);
CREATE TABLE IF NOT EXISTS outbox (
  journal {text} NOT NULL, n BIGINT NOT NULL, session_id {text} NOT NULL UNIQUE,
  request {blob} NOT NULL, closed_unix_ms BIGINT NOT NULL, bytes BIGINT NOT NULL,
  state BIGINT NOT NULL, PRIMARY KEY (journal, n));
CREATE INDEX IF NOT EXISTS outbox_states ON outbox (journal, state, n);
CREATE TABLE IF NOT EXISTS dead_letters (
  session_id {text} PRIMARY KEY, journal {text} NOT NULL, reason BIGINT NOT NULL,
  message {text} NOT NULL, unix_ms BIGINT NOT NULL);
CREATE INDEX IF NOT EXISTS dead_letters_of_journals ON dead_letters (journal, session_id);
"""
"""Statements with the types of a dialect left open. `n` is the order of insertion."""
