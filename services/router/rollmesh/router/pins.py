"""Pins of weights: an evaluation keeps the weights of a model until it ends, and pushes wait.

Plain state, except for the wait. Pins and pushes of other routers are known by their last list.
Each is announced before the peers are asked, so of a pin and a push at two routers at least one
sees the other.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rollmesh.internal.v1 import peers_pb2
from rollmesh.router.config import RouterConfig
from rollmesh.runtime import clock, told
from rollmesh.runtime.errors import (
    InvalidFieldError,
    OverloadedError,
    ShuttingDownError,
    WeightsPinnedError,
)
from rollmesh.runtime.telemetry import fields
from rollmesh.v1 import router_pb2

_log = logging.getLogger(__name__)
_MOST_PINS = 1_024
_HEARD_MS = 5_000
"""Time for which the last list of a peer tells of its pushes. A dead one has none."""
_SPARE_MS = 5_000
"""Time before the deadline of a push at which it gives up, to say why."""


@dataclass(frozen=True, slots=True)
class _Pin:
    """A pin. Times are monotonic milliseconds."""

    holder: str
    policy_version: int
    ends_ms: int
    lapses_ms: int
    """When it ends unless it is renewed."""

    @property
    def until_ms(self) -> int:
        return min(self.ends_ms, self.lapses_ms)


@dataclass(frozen=True, slots=True)
class _Heard:
    """The last list of a peer for a model."""

    pins: list[_Pin]
    pushes: int
    heard_ms: int


class Pins:
    """The pins of all models, and the pushes of weights that wait or are under way."""

    def __init__(self, config: RouterConfig) -> None:
        self._pin_ms, self._most_ms = config.pin_ms, config.max_pin_ms
        self._own: dict[str, dict[str, _Pin]] = {}
        self._pushes: Counter[str] = Counter()
        self._peers: dict[tuple[str, str], _Heard] = {}
        """By the peer's address and by model."""
        self._changed = asyncio.Event()
        self._ended = False

    def hold(self, model: str, holder: str, policy_version: int, remaining_ms: int) -> bool:
        """Sets or renews a pin. Returns whether it is new, here and at the peers.

        Raises:
            InvalidFieldError: Its time is too long.
            OverloadedError: There are too many.
        """
        if remaining_ms > self._most_ms:
            raise InvalidFieldError(
                "remaining_ms",
                f"is {remaining_ms}; give at most {self._most_ms}, the router's max_pin_ms",
            )
        now_ms = clock.monotonic_ms()
        own = {at: pin for at, pin in self._own.get(model, {}).items() if pin.until_ms > now_ms}
        if holder not in own and len(own) >= _MOST_PINS:
            raise OverloadedError(f"{len(own)} evaluations pin the weights; wait until some end")
        known = {(pin.holder, pin.policy_version) for pin in self._of_model(model)}
        ends_ms, lapses_ms = now_ms + remaining_ms, now_ms + self._pin_ms
        self._own[model] = {**own, holder: _Pin(holder, policy_version, ends_ms, lapses_ms)}
        return (holder, policy_version) not in known

    def release(self, model: str, holder: str) -> None:
        """Ends a pin, if there is one."""
        self._own.get(model, {}).pop(holder, None)
        self._changed.set()

    def pushes(self, model: str) -> int:
        """Returns the number of pushes that wait or are under way, at all routers."""
        since_ms = clock.monotonic_ms() - _HEARD_MS
        return self._pushes[model] + sum(
            heard.pushes
            for (_, of), heard in self._peers.items()
            if of == model and heard.heard_ms > since_ms
        )

    @contextmanager
    def pushing(self, model: str) -> Iterator[None]:
        """Announces a push of weights: no new pin is granted until the block ends."""
        self._pushes[model] += 1
        try:
            yield
        finally:
            self._pushes[model] -= 1

    async def wait(self, model: str, limit_s: float | None) -> None:
        """Waits until no pin is left.

        Raises:
            WeightsPinnedError: The deadline is too close.
            ShuttingDownError: The router stops.
        """
        give_up_ms = math.inf
        if limit_s is not None:
            give_up_ms = clock.monotonic_ms() + int(limit_s * 1000) - _SPARE_MS
        is_logged = False
        while pins := self._of_model(model):
            now_ms, pin = clock.monotonic_ms(), max(pins, key=lambda pin: pin.ends_ms)
            left_s = (pin.ends_ms - now_ms) / 1000
            if now_ms >= give_up_ms:
                raise WeightsPinnedError(
                    f"{pin.holder} pins {told(pin.policy_version)} for up to {left_s:.0f} s more; "
                    "push again later, or end it",
                    policy_version=pin.policy_version,
                    retry_delay_ms=pin.until_ms - now_ms,
                )
            if not is_logged:
                found = fields(model=model, holder=pin.holder, at_most_s=round(left_s))
                _log.info("push waits for pinned weights", extra=found)
                is_logged = True
            at_ms = min(give_up_ms, *(one.until_ms for one in pins))
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(at_ms - clock.monotonic_ms(), 0) / 1000):
                    await self._changed.wait()
            if self._ended:
                raise ShuttingDownError("the router is shutting down; push at another one")

    def end(self) -> None:
        """Ends the waits, with an error."""
        self._ended = True
        self._changed.set()

    def stated(self) -> Iterator[peers_pb2.ModelPins]:
        """Yields this router's own pins and pushes, for its peers."""
        now_ms = clock.monotonic_ms()
        for model in {*self._own, *self._pushes}:
            pins = [pin for pin in self._own.get(model, {}).values() if pin.until_ms > now_ms]
            yield peers_pb2.ModelPins(
                model=model,
                pins=[_proto(pin, pin.until_ms - now_ms) for pin in pins],
                pushes=self._pushes[model],
            )

    def heard(self, peer: str, stated: Iterable[peers_pb2.ModelPins]) -> None:
        """Takes the pins and pushes of a peer in place of its former ones."""
        now_ms = clock.monotonic_ms()
        for key in [key for key in self._peers if key[0] == peer]:
            del self._peers[key]
        for one in stated:
            pins = [
                _Pin(pin.holder, pin.policy_version, until_ms, until_ms)
                for pin, until_ms in ((pin, now_ms + pin.remaining_ms) for pin in one.pins)
            ]
            self._peers[peer, one.model] = _Heard(pins, one.pushes, now_ms)
        self._changed.set()

    def shown(self, model: str) -> list[router_pb2.WeightPin]:
        """Returns the pins of a model as clients see them."""
        now_ms = clock.monotonic_ms()
        return [_proto(pin, pin.ends_ms - now_ms) for pin in self._of_model(model)]

    def _of_model(self, model: str) -> list[_Pin]:
        pins = [pin for (_, of), one in self._peers.items() if of == model for pin in one.pins]
        now_ms, own = clock.monotonic_ms(), self._own.get(model, {})
        both = {pin.holder: pin for pin in [*pins, *own.values()] if pin.until_ms > now_ms}
        return list(both.values())


def _proto(pin: _Pin, remaining_ms: int) -> router_pb2.WeightPin:
    return router_pb2.WeightPin(
        holder=pin.holder, policy_version=pin.policy_version, remaining_ms=max(remaining_ms, 1)
    )
