"""Limits on the content of one session."""

import asyncio
from collections.abc import Sequence

from rollmesh.gateway.config import GatewayConfig
from rollmesh.gateway.session import EDGE_BYTES, Session, Turn
from rollmesh.gateway.tree import Edge, Spent
from rollmesh.runtime import clock
from rollmesh.runtime.codec import name_of
from rollmesh.runtime.errors import BudgetSpentError, SessionLimitError
from rollmesh.v1 import sampling_pb2, session_pb2

_MOST_EDGES = 4096  # of one session


def check_limits(config: GatewayConfig, session: Session) -> None:
    """Checks that a session may take another turn.

    Raises:
        SessionLimitError: The session has reached a limit.
    """
    tree = session.tree
    for name, held, most in (
        ("nodes", len(tree.nodes), config.max_session_nodes),
        ("tokens", tree.tokens, config.max_session_tokens),
        ("bytes", tree.text_bytes, config.max_session_bytes),
    ):
        if held >= most:
            raise SessionLimitError(
                f"the session holds {held} {name} and may hold {most}; close it, or raise "
                f"max_session_{name} of the gateway",
                session_id=session.spec.session_id,
            )


def check_start(config: GatewayConfig, session: Session) -> None:
    """Checks the context with which a session starts.

    Raises:
        SessionLimitError: It is larger than a session may be.
    """
    tree = session.tree
    for name, held in (
        ("nodes", len(tree.nodes)),
        ("tokens", tree.tokens),
        ("bytes", tree.text_bytes),
        ("images", len(session.images)),
        ("image_bytes", session.image_bytes),
        ("record_bytes", session.record_bytes),
    ):
        if held > (most := getattr(config, f"max_session_{name}")):
            raise SessionLimitError(
                f"start: the context holds {held} {name.replace('_', ' ')} and a session may hold "
                f"{most}; start from an earlier node, or raise max_session_{name} of the gateway"
            )


def check_edges(config: GatewayConfig, session: Session, new: Sequence[Edge]) -> None:
    """Checks that a session may have more edges.

    Raises:
        SessionLimitError: It would have too many, or its record would be too large to hand over.
    """
    held = session.record_bytes + sum(turn.record_bytes for turn in session.in_flight)
    if held + EDGE_BYTES * len(new) > config.max_session_record_bytes:
        raise SessionLimitError(
            f"edges: with them, the session's record would have more than "
            f"{config.max_session_record_bytes} bytes; close it, or raise "
            "max_session_record_bytes of the gateway",
            session_id=session.spec.session_id,
        )
    if (count := len(session.tree.edges) + len(new)) > _MOST_EDGES:
        raise SessionLimitError(
            f"edges: the session would have {count} of them and may have {_MOST_EDGES}; declare "
            "fewer, or close it",
            session_id=session.spec.session_id,
        )


def check_budget(session: Session, new: int) -> None:
    """Checks that a session's budget has room for `new` more turns.

    Raises:
        BudgetSpentError: It has not.
    """
    budget, tree = session.spec.budget, session.tree
    if budget.calls:
        held = tree.turns + sum(not turn.is_attached for turn in session.in_flight)
        if held + new > budget.calls:
            raise _spent(session, session_pb2.BUDGET_KIND_CALLS, budget.calls)
    if budget.time_ms and clock.unix_ms() - session.spec.opened_unix_ms >= budget.time_ms:
        raise _spent(session, session_pb2.BUDGET_KIND_TIME, budget.time_ms)
    if budget.sampled_tokens and tree.sampled_tokens >= budget.sampled_tokens:
        raise _spent(session, session_pb2.BUDGET_KIND_SAMPLED_TOKENS, budget.sampled_tokens)


async def book_tokens(session: Session, turn: Turn, sampling: sampling_pb2.SamplingParams) -> None:
    """Books the tokens of a turn and limits its `max_tokens` to the rest of the session's budget.

    A turn for which turns in flight may leave too little waits until one of them has ended.

    Raises:
        BudgetSpentError: Nothing is left.
    """
    most, tree = session.spec.budget.sampled_tokens, session.tree
    if not most:
        return
    while True:
        held = [one for one in session.in_flight if one.booked_tokens]
        left = most - tree.sampled_tokens
        free = left - sum(one.booked_tokens for one in held)
        tasks = [one.task for one in held if one.task is not None]
        if free >= sampling.max_tokens or left < 1 or not tasks:
            break
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if free < 1:
        raise _spent(session, session_pb2.BUDGET_KIND_SAMPLED_TOKENS, most)
    turn.is_limited = free < sampling.max_tokens
    turn.booked_tokens = sampling.max_tokens = min(sampling.max_tokens, free)
    if sampling.HasField("min_tokens"):
        sampling.min_tokens = min(sampling.min_tokens, sampling.max_tokens)


def _spent(session: Session, kind: Spent, limit: int) -> BudgetSpentError:
    name = name_of(session_pb2.BudgetKind.DESCRIPTOR, kind).lower()
    size = f"{limit} ms" if kind == session_pb2.BUDGET_KIND_TIME else f"{limit}"
    return BudgetSpentError(
        f"the session's budget of {name} is spent, which is {size}; end the work and close the "
        "session",
        session_id=session.spec.session_id,
        budget=name,
        limit=limit,
    )


def reserve(config: GatewayConfig, session: Session, turn: Turn, added: int) -> None:
    """Reserves room in the session's record for a turn while it is in flight.

    Args:
        config: The limits.
        session: The session.
        turn: The turn.
        added: Most that the turn may add without new images, bytes.

    Raises:
        SessionLimitError: With the turn, the record would be too large to hand over, or the session
            would have more images than it may.
    """
    turn.record_bytes = 0
    held, most = session.record_bytes, config.max_session_record_bytes
    new: dict[str, int] = {}
    """Sizes of the new images of all turns in flight, each counted once, bytes."""
    for other in session.in_flight:
        held += other.record_bytes
        for sha256, image in other.images.items():
            if sha256 not in session.images:
                new[sha256] = len(image.data)
    if new:
        size = sum(new.values())
        for name, count in (
            ("images", len(session.images) + len(new)),
            ("image_bytes", session.image_bytes + size),
        ):
            if count > (limit := getattr(config, f"max_session_{name}")):
                raise SessionLimitError(
                    f"the session would have {count} {name.replace('_', ' ')} with this turn and "
                    f"may have {limit}; leave some out, or raise max_session_{name} of the gateway",
                    session_id=session.spec.session_id,
                )
        held += size
    if held + added > most:
        raise SessionLimitError(
            f"the session's record would have {held + added} bytes with this turn and may have "
            f"{most}; close it, or raise max_session_record_bytes of the gateway",
            session_id=session.spec.session_id,
        )
    turn.record_bytes = added
