"""The dependencies of turns: the model's files, the engines and the threads."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from rollmesh.chat import ModelTokenizer
from rollmesh.chat.parsing import AnswerFormat
from rollmesh.chat.templates import Continuation, SpecialText
from rollmesh.gateway.config import GatewayConfig
from rollmesh.gateway.journal import ModelFiles
from rollmesh.gateway.tree import Tree
from rollmesh.mesh import Failover, LeaseClient
from rollmesh.runtime import FairSlots
from rollmesh.v1 import session_pb2

if TYPE_CHECKING:
    from rollmesh.gateway.vllm_parser import VllmParser

_Result = TypeVar("_Result")


class FairExecutor:
    """Runs the work of many owners in a few threads, one piece at a time. Owners take turns."""

    def __init__(self, executor: Executor, workers: int) -> None:
        self._executor = executor
        self._slots = FairSlots(workers)

    async def run(self, owner: str, work: Callable[[], _Result]) -> _Result:
        """Runs work once it is the owner's turn and returns its result.

        A caller that is cancelled while it waits is skipped. Work that has started runs to
        completion, and has its slot until then.
        """
        loop = asyncio.get_running_loop()
        await self._slots.take(owner)
        running = self._executor.submit(work)
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._slots.give))
        return await asyncio.wrap_future(running)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseDeps:
    """The dependencies of a gateway's sessions, whatever answers in them."""

    config: GatewayConfig
    threads: Executor
    long_work: FairExecutor
    """Tokenises long texts in threads of its own, so that short texts never wait for them."""
    leases: LeaseClient
    model_files: ModelFiles = field(default=ModelFiles("", ""))
    """The files that determine token ids. Their digests are empty if a server elsewhere answers."""
    capture: session_pb2.Capture.ValueType = session_pb2.CAPTURE_TOKENS
    """The recorded part of turns."""

    def new_tree(self) -> Tree:
        """Returns an empty tree for a session."""
        return Tree(frozenset())

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Runs short work off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deps(BaseDeps):
    """The dependencies of turns that engines of the mesh sample."""

    tokenizer: ModelTokenizer
    continuation: Continuation
    """Continues conversations with the model's template."""
    answer_format: AnswerFormat
    """How answers hold reasoning and tool calls."""
    special_text: SpecialText
    """How the template sees text from outside that spells special tokens."""
    vllm_parser: "VllmParser | None"
    failover: Failover
    max_context_tokens: int
    vocabulary_tokens: int
    """Exclusive upper bound of the ids."""
    banned_ids: Sequence[int]
    """Ids that are never sampled, whatever a request says."""

    def new_tree(self) -> Tree:
        """Returns an empty tree for a session."""
        return new_tree(self.continuation)


def new_tree(continuation: Continuation) -> Tree:
    """Returns an empty tree, configured for how a template renders conversations."""
    return Tree(continuation.closing_ids, call_ids=continuation.prints_call_ids)
