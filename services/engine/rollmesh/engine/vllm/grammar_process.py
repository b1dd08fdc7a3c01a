"""A process in which untrusted grammars are compiled on trial. `grammars` starts and asks it.

It imports xgrammar, which takes seconds, and then forks for every grammar. The fork is bounded in
time, memory and stack, and may crash. A fork that runs out of processor time or address space, or
crashes, does so because of its grammar. A fork that runs out of time, or that is killed, was
disturbed by the machine, which says nothing about its grammar.

Standard input is a Unix socket that carries descriptors: first a file with the vocabulary, then a
socket for each trial. The process ends with its input.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

PARSE_S = 0.5
"""CPU time to parse a grammar: vLLM parses it again in the engine's event loop."""
COMPILE_S = 20.0
"""CPU time to compile it. VLLM compiles in threads without Python's lock."""
WALL_S = 30.0
"""Time for both. Longer than their CPU time, so only a busy machine takes as long."""
MEMORY_BYTES = 2 * 1024**3
_STACK_BYTES = 1024 * 1024  # an eighth of the stack of vLLM's threads
_MOST_THREADS = 8  # as vLLM
_LENGTH_BYTES = 4
_PARSED = b"\n"
_MOST_ANSWER = 4096
_NICENESS = 5
_FIRST_TO_KILL = "1000"
Compile = Callable[[str, Callable[[], None]], None]
"""Parses a structural tag, calls the function, and compiles the tag."""


def serve(control: socket.socket, load: Callable[[bytes], Compile]) -> None:
    """Answers trials until there are no more."""
    vocabulary = _receive(control)
    if vocabulary is None:
        return
    compile_ = load(Path(f"/proc/self/fd/{vocabulary}").read_bytes())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for the forks
    while (trial := _receive(control)) is not None:
        if os.fork() == 0:
            with suppress(OSError):  # the asker has left
                _supervise(socket.socket(fileno=trial), compile_)
            os._exit(0)
        os.close(trial)


def _receive(control: socket.socket) -> int | None:
    """Returns the next descriptor. None at the end."""
    _, found, _, _ = socket.recv_fds(control, 1, 1)
    return found[0] if found else None


def _supervise(asker: socket.socket, compile_: Compile) -> None:
    """Reads one grammar, compiles it in another fork, and answers with its outcome."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size = int.from_bytes(_exactly(asker, _LENGTH_BYTES), "big")
    text = _exactly(asker, size).decode()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.close(read)
        _compile(text, compile_, write)
        os._exit(0)
    os.close(write)
    said = _read(read, asker)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL if said is None else 0)
    _, status = os.waitpid(child, 0)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if said is None:
        outcome = {"disturbed": f"did not end within {WALL_S:g} s"}
    elif ended_by == signal.SIGKILL:
        outcome = {"disturbed": "was killed, as the kernel does when memory is short"}
    else:
        outcome = {"problem": _problem(said, ended_by, status)}
    asker.sendall(json.dumps(outcome).encode())
    asker.close()


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (part := source.recv(size - len(data))):
            raise BrokenPipeError("the asker left")
        data += part
    return bytes(data)


def _read(pipe: int, asker: socket.socket) -> bytes | None:
    """Returns everything that the fork says. None if it takes too long, or the asker leaves."""
    said, until = b"", time.monotonic() + WALL_S
    while True:
        ready, _, _ = select.select(
            [pipe, asker.fileno()], [], [], max(until - time.monotonic(), 0)
        )
        if pipe not in ready:
            return None
        part = os.read(pipe, _MOST_ANSWER)
        if not part:
            return said
        said += part


def _problem(said: bytes, ended_by: int, status: int) -> str:
    """Returns the fault of a grammar. Empty if it has none."""
    if ended_by == signal.SIGPROF:
        part, limit = ("compile", COMPILE_S) if _PARSED in said else ("parse", PARSE_S)
        return f"takes longer than {limit:g} s to {part}; shorten its lengths and repetitions"
    if b"bad_alloc" in said or b"MemoryError" in said:
        return f"needs more than {MEMORY_BYTES >> 30} GiB to compile; simplify it"
    if ended_by or not os.WIFEXITED(status) or os.WEXITSTATUS(status):
        return "crashes the grammar compiler; nest it less deeply and simplify it"
    return said.removeprefix(_PARSED).decode(errors="replace")


def _compile(text: str, compile_: Compile, write: int) -> None:
    """Compiles a grammar within the bounds, and writes its fault."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # if memory is short, the kernel ends the trial and not the engine
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_KILL)

    def parsed() -> None:
        os.write(write, _PARSED)
        signal.setitimer(signal.ITIMER_PROF, COMPILE_S)

    def work() -> None:
        try:
            compile_(text, parsed)
        except BaseException as error:  # a library of others may raise anything
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            reason = first.rpartition(".cc:")[2].partition(": ")[2] or first  # without the source
            os.write(write, f"cannot be compiled: {reason}".encode()[:_MOST_ANSWER])

    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, PARSE_S)
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _xgrammar() -> Callable[[bytes], Compile]:
    import xgrammar  # only the process needs it

    def load(vocabulary: bytes) -> Compile:
        tokens = xgrammar.TokenizerInfo.deserialize_json(vocabulary.decode())

        def compile_(text: str, parsed: Callable[[], None]) -> None:
            xgrammar.Grammar.from_structural_tag(text)
            parsed()
            threads = min(os.cpu_count() or 1, _MOST_THREADS)
            compiler: Any = xgrammar.GrammarCompiler(
                tokens, max_threads=threads, cache_enabled=False
            )
            compiler.compile_structural_tag(text)

        return compile_

    return load


def main() -> int:
    """Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its input
    os.nice(_NICENESS)
    control = socket.socket(fileno=os.dup(0))
    serve(control, _xgrammar())
    return 0


if __name__ == "__main__":
    sys.exit(main())
