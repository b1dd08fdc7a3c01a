"""What a protocol of agents implements: it reads requests, and writes answers, streams and errors.

A protocol reads its JSON into the gateway's `ChatRequest` and writes its JSON from the gateway's
answers and deltas. Reading and writing are synchronous; `endpoint.TurnEndpoint` owns the
connection.
"""

from abc import ABC, abstractmethod

from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.process import faults
from rollmesh.sidecar.errors import HttpError
from rollmesh.sidecar.gateways import Gateways
from rollmesh.sidecar.turns.heads import Head
from rollmesh.v1 import gateway_pb2


class StreamWriter(ABC):
    """Writes the server-sent events of one streamed answer.

    The calls for a choice come in the order begin, prompt (choice 0 only, and only if its ids were
    requested), delta (any number), finish; `end` comes once, after every choice has finished. No
    event of any choice is written before choice 0 has begun. What they return is sent at once; an
    empty value sends nothing.
    """

    @abstractmethod
    def begin(self, index: int, answer_id: str) -> bytes:
        """Returns the events that begin a choice.

        Args:
            index: The choice, from 0.
            answer_id: Its id, the same as in the complete answer and in every replay.
        """

    @abstractmethod
    def prompt(self, packed: bytes) -> bytes:
        """Returns the events for the ids of the prompt, unsigned 32-bit little-endian."""

    @abstractmethod
    def delta(self, index: int, delta: gateway_pb2.ChatDelta) -> bytes:
        """Returns the events for the next part of a choice."""

    @abstractmethod
    def finish(self, index: int, done: gateway_pb2.ChatAnswer) -> bytes:
        """Returns the events that end a choice.

        What no delta brought is written from the complete answer: a replay has no deltas.
        """

    @abstractmethod
    def end(self, answers: list[gateway_pb2.ChatAnswer]) -> bytes:
        """Returns the events that end the stream, given the complete answers by choice."""


class TurnCall(ABC):
    """One request, as its protocol read it."""

    def __init__(self, chat: gateway_pb2.ChatRequest, model: str, *, streams: bool) -> None:
        """Takes the request.

        Args:
            chat: The request to the gateway; the endpoint adds what the headers say.
            model: Model named by the client; empty if it named none.
            streams: Whether the answer is streamed.
        """
        self.chat = chat
        self.model = model
        self.streams = streams

    async def answer(self, gateways: Gateways, model: str, request_id: str) -> bytes:
        """Returns the body of the complete answer.

        Args:
            gateways: Answer for the request's session.
            model: Name under which the model answers.
            request_id: Id of the request.

        Raises:
            RollmeshError: The gateway refused the request or failed.
        """
        response = await gateways.chat(self.chat, request_id)
        await faults.reach("sidecar-before-answer")
        return self.whole(response, model)

    async def complete(self, gateways: Gateways) -> None:  # noqa: B027 - most need nothing
        """Adds to the request what the gateway has stored and the body only refers to.

        Args:
            gateways: Answers for the request's session, which the headers have named by now.

        Raises:
            RollmeshError: There is no such thing, or the gateway failed.
        """

    @abstractmethod
    def whole(self, response: gateway_pb2.ChatResponse, model: str) -> bytes:
        """Returns the body of the complete answer.

        Args:
            response: The gateway's answers, one for each choice.
            model: Name under which the model answers.
        """

    @abstractmethod
    def writer(self, model: str) -> StreamWriter:
        """Returns the writer of the streamed answer.

        Args:
            model: Name under which the model answers.
        """


class Protocol(ABC):
    """A protocol that agents speak over HTTP."""

    name: str
    """Its name in metrics."""
    keep_alive: bytes
    """What is sent on a stream after a silence."""
    request_id_header: bytes = b"x-request-id"
    """Header of every answer with the request's id."""

    @abstractmethod
    def read(self, body: bytes, head: Head) -> TurnCall:
        """Reads a request.

        Args:
            body: Its body. A large one is read in a thread.
            head: Its session, headers and id.

        Raises:
            InvalidFieldError: Names the parameter and what is wrong with it.
        """

    @abstractmethod
    def error(self, error: RollmeshError, request_id: str) -> HttpError:
        """Returns an error as the protocol's HTTP answer."""

    @abstractmethod
    def error_event(self, error: RollmeshError, request_id: str) -> bytes:
        """Returns the event that reports an error inside a stream."""
