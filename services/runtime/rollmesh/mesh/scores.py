"""Has the engines of a model score tokens, for clients and collectors."""

import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from itertools import product
from typing import TYPE_CHECKING, Any

from rollmesh.mesh.directory import KEPT_MS, Directory
from rollmesh.mesh.routers import retried
from rollmesh.runtime import clock
from rollmesh.runtime.access import Identity
from rollmesh.runtime.errors import (
    EngineFaultError,
    GenerationAbortedError,
    InvalidFieldError,
    NoEngineError,
    RollmeshError,
    VocabularyMismatchError,
)
from rollmesh.runtime.rpc import (
    SHORT_KEEPALIVE_MS,
    is_tunnel,
    read_stream,
    request_metadata,
    stub_of,
)
from rollmesh.v1 import engine_pb2, engine_pb2_grpc, router_pb2

if TYPE_CHECKING:
    from rollmesh.v1.router_pb2_grpc import RouterServiceAsyncStub as Stub

_ENGINE = router_pb2.REPLICA_KIND_ENGINE
_CAN_SCORE = {router_pb2.EXCLUSION_REASON_UNSPECIFIED, router_pb2.EXCLUSION_REASON_MISFIT}
"""A tokenizer that does not fit a gateway is no obstacle: the caller gives ids."""
_LIST_TIMEOUT_S = 60.0
_RETRY_MS = 1_000
_LOST_MS = 5_000
"""Time for which an engine that failed is asked last, milliseconds."""


def weights_of(
    response: router_pb2.ListReplicasResponse, model: str, field: str = "model"
) -> router_pb2.ModelWeights:
    """Returns the weights of a model, which `field` names. An empty name selects the only model.

    Raises:
        InvalidFieldError: The mesh has no such model, or several and no name was given.
    """
    found = [one for one in response.models if model in {"", one.model}]
    if len(found) != 1:
        names = ", ".join(one.model for one in response.models) or "none"
        raise InvalidFieldError(field, f"is {model!r}; name one of the mesh's ({names})")
    return found[0]


class ScoringEngines(Directory):
    """The engines of a mesh, and the sequences that this process has them score."""

    def __init__(self, router: str, identity: Identity | None = None) -> None:
        """Connects when first used."""
        super().__init__(router, SHORT_KEEPALIVE_MS, identity)
        self._listed = router_pb2.ListReplicasResponse()
        self._running: Counter[str] = Counter()  # by address
        self._lost_ms: dict[str, int] = {}  # until when an engine is asked last

    async def score(
        self,
        request: engine_pb2.ScoreTokensRequest,
        timeout_s: float,
        *,
        model: str = "",
        same_vocabulary_as: str = "",
    ) -> tuple[engine_pb2.ScoreTokensResponse, str]:
        """Has one engine after another score a sequence, the least busy first, until one did.

        Args:
            request: The sequence. Its id and model are set here.
            timeout_s: Time limit of all tries together, seconds.
            model: Name of the model. May be empty if the mesh has only one.
            same_vocabulary_as: Name of a model whose tokenizer the model must have. Empty: any.

        Returns:
            The scores of all positions in one message, and the id of the engine.

        Raises:
            VocabularyMismatchError: The tokenizers differ.
            InvalidFieldError: The mesh has no such model, or the engine refuses the sequence.
            NoEngineError: No engine can score now.
            RollmeshError: No engine scored it in time.
        """

        async def once(left_s: float) -> tuple[engine_pb2.ScoreTokensResponse, str]:
            await self._list()
            try:
                engines = self._able(model, same_vocabulary_as)
            except InvalidFieldError:  # the list may be older than the remedy
                self._listed_ms = None
                await self._list()
                engines = self._able(model, same_vocabulary_as)
            engine = min(engines, key=self._busy)
            self._running[engine.address] += 1
            try:
                request.request_id, request.model = uuid.uuid4().hex, engine.model
                found = await self._parts(engine, request, left_s)
                return _joined(request, found, engine.replica_id), engine.replica_id
            except RollmeshError as error:
                if error.code != "INVALID_ARGUMENT":  # which says nothing about the engine
                    self._lost_ms[engine.address] = clock.monotonic_ms() + _LOST_MS
                raise
            finally:
                self._running[engine.address] -= 1

        return await retried(once, timeout_s, GenerationAbortedError)

    async def _parts(
        self, engine: router_pb2.ReplicaHello, request: engine_pb2.ScoreTokensRequest, left_s: float
    ) -> list[engine_pb2.ScoreTokensResponse]:
        """Calls an engine, through a router if the engine dials out."""
        options: dict[str, Any] = {"timeout": left_s, "metadata": request_metadata()}
        if is_tunnel(engine.address):
            asked = router_pb2.RelayScoreTokensRequest(engine_id=engine.replica_id, request=request)
            call = (await self._routers.stub()).RelayScoreTokens(asked, **options)
            async with aclosing(read_stream(call)) as relayed:
                return [one.part async for one in relayed]
        stub: engine_pb2_grpc.EngineServiceAsyncStub
        stub = stub_of(self.channel(engine.address), engine_pb2_grpc.EngineServiceStub)
        async with aclosing(read_stream(stub.ScoreTokens(request, **options))) as parts:
            return [one async for one in parts]

    def _busy(self, one: router_pb2.ReplicaHello) -> tuple[bool, bool, float, str]:
        """Returns the rank of an engine for a sequence. One that failed is asked last for 5 s."""
        count = one.load.running + one.load.waiting + self._running[one.address]
        is_lost = self._lost_ms.get(one.address, 0) > clock.monotonic_ms()
        # Callers that begin at the same time begin at different engines.
        return is_lost, one.load.paused, count / one.lease_capacity, uuid.uuid4().hex

    async def _read(self) -> None:
        async def list_them(stub: "Stub", limit_s: float) -> router_pb2.ListReplicasResponse:
            return await stub.ListReplicas(router_pb2.ListReplicasRequest(), timeout=limit_s)

        self._listed = await self._routers.ask(list_them, _LIST_TIMEOUT_S)
        now_ms = clock.monotonic_ms()
        addresses = {one.hello.address for one in self._listed.replicas}
        self._lost_ms = {at: ms for at, ms in self._lost_ms.items() if ms > now_ms}
        await self._close_unused(now_ms - KEPT_MS, addresses | (+self._running).keys())

    def _able(self, model: str, same_vocabulary_as: str) -> Sequence[router_pb2.ReplicaHello]:
        """Returns the engines of a model that can score.

        Raises:
            InvalidFieldError: The mesh has no such model, or the tokenizers differ.
            NoEngineError: None can score now.
        """
        model = weights_of(self._listed, model).model
        hellos = [one.hello for one in self._listed.replicas if one.hello.kind == _ENGINE]
        engines = [one for one in hellos if one.model == model]
        if same_vocabulary_as:
            same_as = weights_of(self._listed, same_vocabulary_as, "same_vocabulary_as").model
            _check_vocabularies(engines, [one for one in hellos if one.model == same_as])
        why = {
            one.hello.replica_id: one.exclusion.explanation
            for one in self._listed.replicas
            if one.exclusion.reason not in _CAN_SCORE
        }
        if able := [one for one in engines if one.replica_id not in why]:
            return able
        said = "; ".join(f"{one.replica_id}: {why[one.replica_id]}" for one in engines)
        raise NoEngineError(
            f"no engine of {model!r} can score now ({said or 'none is there'}); try again",
            retry_delay_ms=_RETRY_MS,
        )


def _check_vocabularies(
    engines: Sequence[router_pb2.ReplicaHello], others: Sequence[router_pb2.ReplicaHello]
) -> None:
    """Checks that engines have the tokenizer of the engines of another model.

    Sizes are compared only of engines without a tokenizer: models of one family fill up their
    vocabularies differently.

    Raises:
        VocabularyMismatchError: They have different ones.
        NoEngineError: The other model has no engine to compare with.
    """
    if not others:
        raise NoEngineError(
            "same_vocabulary_as: the model has no engine to compare with; try again",
            retry_delay_ms=_RETRY_MS,
        )
    for engine, other in product(engines, others):
        if (mine := _vocabulary(engine)) != (its := _vocabulary(other)):
            raise VocabularyMismatchError(
                "same_vocabulary_as",
                f"engine {engine.replica_id} of {engine.model!r} has {mine}, and "
                f"{other.replica_id} of {other.model!r} has {its}; name a model with the same",
            )


def _vocabulary(engine: router_pb2.ReplicaHello) -> str:
    if engine.tokenizer_sha256:
        return f"the tokenizer {engine.tokenizer_sha256}"
    return f"no tokenizer and {engine.vocabulary_tokens} ids"


def _joined(
    request: engine_pb2.ScoreTokensRequest,
    parts: Sequence[engine_pb2.ScoreTokensResponse],
    engine_id: str,
) -> engine_pb2.ScoreTokensResponse:
    """Returns the parts of an answer as one.

    Raises:
        EngineFaultError: They do not fit the request.
    """
    count = len(request.token_ids_u32le) // 4 - max(request.start, 1)
    width = len(request.ids_u32le) // 4 // count if request.ids_u32le else request.top_k
    whole = engine_pb2.ScoreTokensResponse(
        logprobs_f32le=b"".join([one.logprobs_f32le for one in parts]),
        top_ids_u32le=b"".join([one.top_ids_u32le for one in parts]),
        top_logprobs_f32le=b"".join([one.top_logprobs_f32le for one in parts]),
    )
    versions = {one.policy_version for one in parts}
    ids = 0 if request.ids_u32le else count * width
    wanted = [4 * count, 4 * ids, 4 * count * width, 1]
    sizes = [len(value) for value in (whole.logprobs_f32le, whole.top_ids_u32le)]
    sizes += [len(whole.top_logprobs_f32le), len(versions)]
    if sizes != wanted:
        raise EngineFaultError(f"engine {engine_id} answered {sizes} for {count} tokens")
    whole.policy_version = versions.pop()
    return whole
