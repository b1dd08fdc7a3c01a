"""`rollmesh export`: stored sessions as the record, rows, data for SFT, ATIF, Inspect or OTLP."""

import argparse
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from pathlib import Path

from rollmesh.client import MeshAddresses
from rollmesh.mesh import CollectorDirectory
from rollmesh.record import beside
from rollmesh.record.atif import write_documents
from rollmesh.record.evals import write_log
from rollmesh.record.otel import send_spans, write_spans
from rollmesh.record.rows import NO_MESSAGES, Decoder, decoder, write_rows
from rollmesh.record.tables import Stored
from rollmesh.runtime.access import identity
from rollmesh.runtime.codec import summary_of
from rollmesh.runtime.config import ConfigError, TracesConfig
from rollmesh.v1 import collector_pb2, session_pb2

_SELECTED = ("run_id", "group_id", "model", "outcome", "purpose")
"""The flags that select sessions, by the names of `summary_of`."""
ROLL_SESSIONS, ROLL_BYTES = 10_000, 128 * 2**20
"""The size at which files of a record are finished."""


def main() -> int:
    """Returns the exit code: 0, 1 for a collector's error, 2 for an invalid flag."""
    parser = argparse.ArgumentParser(prog="rollmesh export", description=__doc__)
    parser.add_argument(
        "--to",
        type=lambda text: text if "://" in text else Path(text),
        required=True,
        help="folder, FILE.jsonl or FILE.parquet, or for otel the URL of a receiver",
    )
    parser.add_argument(
        "--format",
        choices=("record", "rows", "sft", "atif", "inspect", "otel"),
        default="record",
        help="record (sessions, trees and tokens as Parquet), rows (one file, a row for each "
        "trajectory), sft (messages, tools and masks, for supervised fine-tuning), atif (a "
        "folder of documents, one for each leaf), inspect (a log of Inspect, a sample for each "
        "session), or otel (spans of OpenTelemetry as lines of JSON, or sent by OTLP)",
    )
    parser.add_argument("--record", type=Path, help="reads the record in this folder, no collector")
    parser.add_argument("--session", default="", help="only the session of this id")
    parser.add_argument(
        "--consumer", default="", help="only what the filter of this consumer leaves of sessions"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder of the model; adds texts to rows, and to atif where there are no messages",
    )
    parser.add_argument("--content", action="store_true", help="messages in spans of otel")
    parser.add_argument(
        "--protocol", choices=("http", "grpc"), default="http", help="of the receiver of otel"
    )
    parser.add_argument(
        "--headers-file", default="", help="headers for the receiver, NAME: VALUE lines, mode 0600"
    )
    parser.add_argument("--run-id", default="", help="only sessions of this run")
    parser.add_argument("--group-id", default="", help="only sessions of this group")
    parser.add_argument("--model", default="", help="only sessions of this model")
    outcomes, purposes = ("COMPLETED", "FAILED", "ABORTED", "LOST"), ("TRAIN", "EVAL", "OTHER")
    parser.add_argument("--outcome", choices=outcomes, help="only sessions that ended so")
    parser.add_argument("--purpose", choices=purposes, help="only sessions of this purpose")
    MeshAddresses.add_flags(parser)
    options = parser.parse_args()
    return identity.run_tool(parser.prog, options, os.environ, partial(_export, options))


async def _export(options: argparse.Namespace) -> list[str]:
    """Writes the chosen sessions. Returns the errors that did not end it."""
    if options.tokenizer and options.format not in {"rows", "atif"}:
        raise ConfigError(
            f"tokenizer: adds text to rows and atif; leave it out for {options.format}"
        )
    if options.record and options.consumer:
        raise ConfigError("consumer: a record has none; leave it out, or --record")
    if options.format != "otel" and isinstance(options.to, str):
        raise ConfigError(f"to: {options.to} is a URL; give a path, or --format otel")
    damaged: list[str] = []
    found = _recorded(options, damaged) if options.record else _stored(options, damaged)
    async with aclosing(_chosen(found, options)) as chosen:
        if options.format == "record":
            return await _write_record(chosen, options.to) + damaged
        sessions = (one.session async for one in chosen)
        match options.format:
            case "otel":
                await _write_spans(sessions, options)
            case "atif":
                await _write_atif(sessions, options.to, decoder(options.tokenizer))
            case "inspect":
                await _write_log(sessions, options.to)
            case form:
                decode = decoder(options.tokenizer)
                done = await write_rows(sessions, options.to, decode, sft=form == "sft")
                print(f"{done.sessions} sessions, {done.rows} trajectories: {options.to}")
                if done.left_out:
                    print(f"left out: {done.left_out} {NO_MESSAGES}", file=sys.stderr)
    return damaged


async def _write_atif(
    sessions: AsyncGenerator[session_pb2.SessionRecord], to: Path, decode: Decoder | None
) -> None:
    if to.suffix:
        raise ConfigError(f"to: {to} is a file; give a folder")
    count = documents = 0
    try:
        async for session in sessions:
            count += 1
            documents += write_documents(session, to, decode)
    except OSError as error:
        raise ConfigError(f"to: {to}: {error}") from error
    if count and not documents:
        raise ConfigError(f"format: all {NO_MESSAGES}; or give --tokenizer")
    print(f"{count} sessions, {documents} documents: {to}")


async def _write_log(sessions: AsyncGenerator[session_pb2.SessionRecord], to: Path) -> None:
    if to.suffix != ".json":
        raise ConfigError(f"to: {to.name!r} is not written with --format inspect; give .json")
    try:
        done = await write_log(sessions, to)
    except OSError as error:
        raise ConfigError(f"to: {to}: {error}") from error
    if done.left_out and not done.rows:
        raise ConfigError(f"format: all {NO_MESSAGES}")
    print(f"{done.sessions} sessions, {done.rows} samples: {to}")


async def _write_record(sessions: AsyncGenerator[Stored], to: Path) -> list[str]:
    """Writes a record. Returns a line about sessions set aside."""
    if to.suffix in {".jsonl", ".parquet"}:
        raise ConfigError(f"to: {to} is a file; give a folder, or --format rows")
    from rollmesh.record.files import Writer  # needs pyarrow

    count = files = 0
    with Writer(to) as writer:
        async for one in sessions:
            writer.add(one.session)
            writer.change(*one)
            count += 1
            if writer.sessions >= ROLL_SESSIONS or writer.bytes >= ROLL_BYTES:
                files += len(writer.commit())
        files += len(writer.commit())
    refused = writer.left_out
    print(f"{count - refused} sessions, {files} files: {to}")
    why = to / beside.FOLDER / beside.REASONS
    return [f"{refused} sessions cannot be written; {why} says why"] if refused else []


async def _write_spans(
    sessions: AsyncGenerator[session_pb2.SessionRecord], options: argparse.Namespace
) -> None:
    if isinstance(options.to, Path):
        try:
            count = await write_spans(sessions, options.to, content=options.content)
        except OSError as error:
            raise ConfigError(f"to: {options.to}: {error}") from error
    else:
        config = TracesConfig(
            traces_endpoint=options.to,
            traces_protocol=options.protocol,
            traces_content=options.content,
            traces_headers_file=options.headers_file,
        )
        count = await send_spans(sessions, config)
    print(f"{count} spans: {options.to}")


async def _stored(options: argparse.Namespace, damaged: list[str]) -> AsyncGenerator[Stored]:
    """Yields the sessions of a collector's store. Any collector does, as they have one."""
    request = collector_pb2.ReadSessionsRequest(
        session_id=options.session, consumer=options.consumer
    )
    collectors = CollectorDirectory(options.router, options.collector)
    try:
        await collectors.find()
        async with aclosing(collectors.stored_sessions(request)) as responses:
            async for response in responses:
                if response.damaged_session_id:
                    damaged.append(f"session {response.damaged_session_id} is damaged; left out")
                else:
                    yield Stored(response.session, response.annotations, response.scores)
    finally:
        await collectors.aclose()


async def _recorded(options: argparse.Namespace, damaged: list[str]) -> AsyncGenerator[Stored]:
    from rollmesh.record.files import read_stored

    for one in read_stored(options.record, damaged):
        if options.session in ("", one.session.session_id):
            yield one


async def _chosen(
    sessions: AsyncGenerator[Stored], options: argparse.Namespace
) -> AsyncGenerator[Stored]:
    wanted = {name: value for name in _SELECTED if (value := getattr(options, name))}
    async with aclosing(sessions):
        async for one in sessions:
            summary = summary_of(one.session)
            if all(summary[name] == value for name, value in wanted.items()):
                yield one


if __name__ == "__main__":
    sys.exit(main())
