"""Closes idle sessions with the turns they have.

One without a turn takes no seat in its group. A client whose CreateSession got no answer may have
opened another session elsewhere, with which the group is complete.
"""

import asyncio
import logging

from rollmesh.gateway.conversation.session import Session
from rollmesh.gateway.sessions.registry import Registry
from rollmesh.runtime import clock
from rollmesh.runtime.errors import RollmeshError
from rollmesh.runtime.telemetry.logs import fields
from rollmesh.v1 import gateway_pb2, session_pb2

_log = logging.getLogger(__name__)
_CHECK_S = 60.0


async def close_idle(registry: Registry, idle_ms: int) -> None:
    """Closes sessions that have been idle for `idle_ms`; runs until it is cancelled."""
    while True:
        for session in registry.unused_since(clock.monotonic_ms() - idle_ms):
            _log.warning(
                "closing an idle session", extra=fields(session_id=session.spec.session_id)
            )
            try:
                await _close(registry, session)
            except RollmeshError as error:  # retried in the next round
                _log.warning(
                    "idle session not closed",
                    extra=fields(session_id=session.spec.session_id, error=str(error)),
                )
        await asyncio.sleep(min(idle_ms / 4000, _CHECK_S))


async def _close(registry: Registry, session: Session) -> None:
    """Closes a session; one that cannot be closed is set aside and affects no other session."""
    request = gateway_pb2.CloseSessionRequest(
        session_id=session.spec.session_id,
        outcome=session_pb2.SESSION_OUTCOME_ABORTED,
        metadata={"closed_by": "idle"},
        superseded=not session.tree.turns,
    )
    try:
        await registry.close(request)
    except RollmeshError:
        raise
    except Exception as error:  # noqa: BLE001 - affects only this session
        await registry.set_aside(session, error)
