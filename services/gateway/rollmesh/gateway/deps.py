"""The dependencies of turns: the model's files, the engines, the limits and the threads."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from rollmesh.chat import ModelTokenizer
from rollmesh.chat.parsing import AnswerFormat
from rollmesh.chat.templates import Continuation, SpecialText
from rollmesh.gateway.config import GatewayConfig
from rollmesh.gateway.session import SessionLimits
from rollmesh.gateway.tree import Tree
from rollmesh.gateway.vllm_parser import VllmParser
from rollmesh.mesh.failover import Failover
from rollmesh.mesh.leases import LeaseClient

# Fair scheduling of threaded work between sessions.
#
# A session that waits for a thread waits for one piece of work of each other session, not for their
# complete queues.

_Result = TypeVar("_Result")


class _Piece(NamedTuple):
    work: Callable[[], Any]
    outcome: asyncio.Future[Any]


class FairExecutor:
    """Runs the work of many owners in a few threads, round-robin, one piece at a time.

    Invariant: `_rounds` contains each owner with waiting work exactly once, in scheduling order.
    The queue is bounded by the number of callers, because each waits for its outcome.
    """

    def __init__(self, executor: Executor, workers: int) -> None:
        """Takes the threads and the number of pieces of work that run at a time."""
        self._executor = executor
        self._free = workers
        self._waiting: dict[str, deque[_Piece]] = {}
        self._rounds: deque[str] = deque()

    def begin(self, owner: str, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Queues work until it is the owner's turn and returns a future for its outcome.

        Work whose future is cancelled while it waits is skipped. Work that has started runs to
        completion.
        """
        outcome: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        if owner not in self._waiting:
            self._waiting[owner] = deque()
            self._rounds.append(owner)
        self._waiting[owner].append(_Piece(work, outcome))
        self._start()
        return outcome

    def _start(self) -> None:
        """Starts queued work in free threads, in round-robin order."""
        while self._free and self._rounds:
            owner = self._rounds.popleft()
            queue = self._waiting[owner]
            piece = queue.popleft()
            if queue:
                self._rounds.append(owner)
            else:
                del self._waiting[owner]
            if not piece.outcome.done():
                self._submit(piece)

    def _submit(self, piece: _Piece) -> None:
        loop = piece.outcome.get_loop()
        try:
            running = self._executor.submit(piece.work)
        except RuntimeError as error:  # the executor was shut down
            piece.outcome.set_exception(error)
            return
        self._free -= 1
        running.add_done_callback(
            lambda done: loop.call_soon_threadsafe(self._ended, piece.outcome, done)
        )

    def _ended(self, outcome: asyncio.Future[Any], done: "Future[Any]") -> None:
        self._free += 1
        if not outcome.done():
            error = done.exception()
            if error is None:
                outcome.set_result(done.result())
            else:
                outcome.set_exception(error)
        self._start()


class Workers:
    """Tokeniser threads. Long texts have their own, so that short texts never wait for them."""

    def __init__(self, short: Executor, long: FairExecutor) -> None:
        """Takes the two pools."""
        self._short = short
        self._long = long

    def run(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Starts short work off the event loop."""
        return asyncio.get_running_loop().run_in_executor(self._short, work)

    def run_long(self, session_id: str, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Queues long work of a session, which runs off the event loop at the session's turn."""
        return self._long.begin(session_id, work)


@dataclass(frozen=True, slots=True)
class Deps:
    """The dependencies of all turns of a gateway."""

    config: GatewayConfig
    tokenizer: ModelTokenizer
    continuation: Continuation
    """Continues conversations with the model's template."""
    answer_format: AnswerFormat
    """How answers hold reasoning and tool calls."""
    special_text: SpecialText
    """How the template sees text from outside that spells special tokens."""
    vllm_parser: VllmParser | None
    workers: Workers
    leases: LeaseClient
    failover: Failover
    limits: SessionLimits
    max_context_tokens: int
    vocabulary_tokens: int
    """Exclusive upper bound of the ids."""
    banned_ids: Sequence[int]
    """Ids that are never sampled, whatever a request says."""


def new_tree(continuation: Continuation) -> Tree:
    """Returns an empty tree, configured for how a template renders conversations."""
    return Tree(continuation.closing_ids, call_ids=continuation.prints_call_ids)
