"""Constraints in vLLM: whether a model supports them, how one is given to it, and its trial.

vLLM parses a grammar in the engine's event loop and compiles it in the process of the model. A
crash of the C++ compiler would end both. Each new grammar is therefore compiled once before in a
process that may die (`grammar_process`), and the outcome is remembered by the grammar's digest. A
trial that the machine disturbed has no outcome: the engine is busy, and the request is tried again.
"""

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollmesh.engine.requests import subschemas, tag_schemas
from rollmesh.runtime.errors import InvalidConstraintError, OverloadedError, RollmeshError
from rollmesh.v1 import engine_pb2

_COMMAND = (sys.executable, "-m", "rollmesh.engine.vllm.grammar_process")
_FIELD = "constraint.structural_tag_json"
_REMEMBERED = 4096
_AT_ONCE = 4
_MOST_WAITING = 256
_TIMEOUT_S = 120.0  # with the start of the process, and others' trials before
_RETRY_MS = 2000
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json")
_SURROGATE = re.compile("[\ud800-\udfff]")
_NOT_COMBINED = {"pattern", "format", "const", "enum"}
"""Other bounds of a string, which xgrammar cannot combine with its length."""


def has_tokenizer(model_path: Path) -> bool:
    """Returns whether a model's directory has the tokenizer that constraints need."""
    return any((model_path / name).exists() for name in _TOKENIZERS)


def vocabulary_of(llm: Any) -> bytes:
    """Returns the tokens of an `AsyncLLM` as vLLM gives them to xgrammar. Call it in a thread."""
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    backend = XgrammarBackend(
        llm.vllm_config,
        tokenizer=llm.renderer.tokenizer,
        vocab_size=llm.vllm_config.model_config.get_vocab_size(),
    )
    compiled = backend.compiler.compile_regex("a")
    return str(compiled.tokenizer_info.serialize_json()).encode()


def written(constraint: engine_pb2.Constraint) -> str:
    """Returns the structural tag for vLLM. Call it in a thread.

    Raises:
        InvalidConstraintError: It is strict, and xgrammar would ignore a part of a JSON schema.
    """
    from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

    tag = json.loads(constraint.structural_tag_json)
    for schema, form in tag_schemas(tag):
        if not isinstance(schema, dict):
            continue
        # Patterns cannot bound strings inside tags or where text is excluded: xgrammar ignores
        # exclusions in patterns.
        takes_patterns = form.get("style", "json") == "json" and not form.get("excludes")
        bounds = list(_bounded_strings(schema))
        unsupported = has_xgrammar_unsupported_json_features(schema)
        if constraint.strict and (unsupported or (bounds and not takes_patterns)):
            raise InvalidConstraintError(
                _FIELD,
                "has a JSON schema with a keyword that cannot be enforced (multipleOf, "
                "uniqueItems, contains, allOf of several, unusual formats, lengths of strings that "
                "may not contain the format's delimiters, ...); remove the keyword, or strict",
            )
        for string in bounds if takes_patterns else ():
            # With length bounds, xgrammar 0.2.8 allows control characters, which are invalid in
            # JSON strings. With a pattern it does not.
            least, most = string.pop("minLength", 0), string.pop("maxLength", None)
            string["pattern"] = length_pattern(least, most)
    text = json.dumps(tag, ensure_ascii=False)
    if not text.isascii() and _SURROGATE.search(text):
        raise InvalidConstraintError(_FIELD, "has a lone surrogate; write whole characters")
    return text


def _bounded_strings(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields the parts of a JSON schema that are strings bounded only by their length."""
    if isinstance(schema, list):
        for one in schema:
            yield from _bounded_strings(one)
    if not isinstance(schema, dict):
        return
    bounds = {key: schema[key] for key in ("minLength", "maxLength") if key in schema}
    is_bounded = bounds and all(type(bound) is int for bound in bounds.values())
    alone = schema.keys().isdisjoint(_NOT_COMBINED)
    if schema.get("type") == "string" and is_bounded and alone:
        yield schema
    for one in subschemas(schema):
        yield from _bounded_strings(one)


class Grammars:
    """The grammars that were tried, and the process that tries new ones."""

    def __init__(self, command: Sequence[str] = _COMMAND) -> None:
        """Starts nothing yet."""
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._vocabulary: int | None = None
        self._problems: OrderedDict[bytes, str] = OrderedDict()
        self._running: dict[bytes, asyncio.Future[OverloadedError | None]] = {}
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._starting = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Process id of the process. None if there is none."""
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Starts the process. It loads its libraries meanwhile."""
        async with self._starting:
            if self._process is not None and self._process.poll() is None:
                return
            self.stop()
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = await asyncio.to_thread(
                    subprocess.Popen, self._command, stdin=theirs.fileno(), start_new_session=True
                )
            self._control = ours
            if self._vocabulary is not None:
                socket.send_fds(ours, [b"v"], [self._vocabulary])

    async def set_vocabulary(self, vocabulary: bytes) -> None:
        """Tells the process the tokens of the model, as `xgrammar.TokenizerInfo` writes them."""
        self._vocabulary = await asyncio.to_thread(_in_memory, vocabulary)
        if self._control is None:
            await self.start()
        else:
            socket.send_fds(self._control, [b"v"], [self._vocabulary])

    def stop(self) -> None:
        """Ends the process."""
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with its forks
            self._process.wait()
            self._process = None

    async def check(self, text: str) -> None:
        """Compiles a structural tag on trial, unless its outcome is known.

        Raises:
            InvalidConstraintError: It is no grammar, crashes the compiler, or takes too long.
            OverloadedError: Too many new grammars wait, or the machine disturbed the trial.
        """
        key = hashlib.blake2b(text.encode(), digest_size=16).digest()
        while key not in self._problems:
            if (running := self._running.get(key)) is not None:
                await asyncio.wait({running})
                if (busy := running.result()) is not None:  # for all who waited, not one by one
                    raise OverloadedError(busy.message, retry_delay_ms=_RETRY_MS) from busy
                continue
            if len(self._running) >= _MOST_WAITING:
                raise OverloadedError(
                    "too many new grammars wait for the compiler", retry_delay_ms=_RETRY_MS
                )
            self._running[key] = asyncio.get_running_loop().create_future()
            busy = None
            try:
                self._problems[key] = await self._tried(text)
                if len(self._problems) > _REMEMBERED:
                    self._problems.popitem(last=False)
            except OverloadedError as error:
                busy = error
                raise
            finally:
                self._running.pop(key).set_result(busy)
        self._problems.move_to_end(key)
        if problem := self._problems[key]:
            raise InvalidConstraintError(_FIELD, problem)

    async def _tried(self, text: str) -> str:
        """Returns the fault of a grammar. Tries again if the process had died.

        Raises:
            OverloadedError: The trial says nothing about the grammar.
        """
        try:
            async with asyncio.timeout(_TIMEOUT_S), self._slots:
                for _ in range(2):
                    await self.start()
                    process = self._process
                    answer = await self._asked(text)
                    if answer:
                        outcome: dict[str, str] = json.loads(answer)
                        break
                    async with self._starting:  # a killed process may not have ended yet
                        if self._process is process:
                            self.stop()
                else:
                    raise RollmeshError("the grammar compiler's process ends; see the engine's log")
        except TimeoutError as error:
            raise OverloadedError(
                "the grammar compiler is busy", retry_delay_ms=_RETRY_MS
            ) from error
        if disturbed := outcome.get("disturbed"):
            raise OverloadedError(
                f"the grammar compiler is busy: a trial {disturbed}", retry_delay_ms=_RETRY_MS
            )
        return outcome["problem"]

    async def _asked(self, text: str) -> bytes:
        """Returns the answer. Empty if the process died."""
        assert self._control is not None
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._control, [b"t"], [theirs.fileno()])
            reader, writer = await asyncio.open_connection(sock=ours)
        except OSError:
            ours.close()
            return b""
        try:
            data = text.encode()
            writer.write(len(data).to_bytes(4, "big") + data)
            return await reader.read()
        except OSError:
            return b""
        finally:
            writer.close()


def _in_memory(data: bytes) -> int:
    """Returns the descriptor of a file in memory, which any process can read from its start."""
    descriptor = os.memfd_create("vocabulary")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return descriptor


# Patterns of a bounded length.
#
# xgrammar parses a repetition in time quadratic in its count: `.{0,4000}` takes six seconds. It is
# therefore written in blocks.

_BLOCK = 64


def length_pattern(least: int, most: int | None) -> str:
    """Returns a pattern of `least` to `most` characters. None is without an upper bound."""
    if max(least, most or 0) <= _BLOCK:
        return f"^.{{{least},{'' if most is None else most}}}$"
    rest = ".*" if most is None else _up_to(most - least)
    return f"^{_exactly(least)}{rest}$"


def _exactly(count: int) -> str:
    blocks, rest = divmod(count, _BLOCK)
    return (f"(.{{{_BLOCK}}}){{{blocks}}}" if blocks else "") + (f".{{{rest}}}" if rest else "")


def _up_to(count: int) -> str:
    blocks, rest = divmod(count, _BLOCK)
    if not blocks:
        return f".{{0,{count}}}"
    block = f"(.{{{_BLOCK}}})"
    return f"({block}{{0,{blocks - 1}}}.{{0,{_BLOCK - 1}}}|{block}{{{blocks}}}.{{0,{rest}}})"
