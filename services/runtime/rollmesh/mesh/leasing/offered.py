"""The policy versions that a router has offered, by which an answer from the future is known."""

import asyncio
import itertools
from contextlib import suppress
from typing import NamedTuple

from rollmesh.v1 import router_pb2

_NEWS_S = 5.0  # a push may reach an engine before its news reach everybody else


class Offered(NamedTuple):
    """The policy versions that a router has offered to the engines of a model."""

    epoch: int = 0
    """Counts up when `newest` becomes known or unknown, and when it falls; for some other models,
    too."""
    newest: int | None = None
    """The highest of them; None if nothing was pushed, or no router says so."""


class OfferedVersions:
    """What the routers have offered, by model.

    A push goes through one router, and the others hear of it later, so the highest version counts.
    """

    def __init__(self) -> None:
        """Starts without news."""
        self._models: dict[str, Offered] = {}  # those of which something is known
        self._epochs = itertools.count(1)
        self._lost_epoch = 0
        """Epoch of the models of which nothing is known."""
        self._said: dict[tuple[str, str], int] = {}  # by model and router
        self._news = asyncio.Event()

    @property
    def models(self) -> int:
        """Number of models of which something is known."""
        return len(self._models)

    def of(self, model: str) -> Offered:
        """Returns what the router offers to the engines of a model."""
        return self._models.get(model) or Offered(self._lost_epoch)

    async def until(self, model: str, policy_version: int) -> Offered:
        """Waits for up to 5 s until a version is offered; returns what is offered then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_NEWS_S):
                while (offered := self.of(model)).newest is not None:
                    if offered.newest >= policy_version:
                        break
                    await self._news.wait()
        return self.of(model)

    def take(self, router: str, weights: router_pb2.OfferedWeights) -> None:
        """Takes news from the router of an address."""
        if weights.HasField("policy_version"):
            self._said[weights.model, router] = weights.policy_version
        else:
            self._said.pop((weights.model, router), None)
        self._changed(weights.model)

    def lose(self, router: str) -> None:
        """Notes that a router went away."""
        for model, one in list(self._said):
            if one == router:
                del self._said[model, one]
                self._changed(model)

    def _changed(self, model: str) -> None:
        said = (version for (one, _), version in self._said.items() if one == model)
        newest, before = max(said, default=None), self._models.get(model)
        if newest is None:
            if self._models.pop(model, None) is not None:
                self._lost_epoch = next(self._epochs)
        elif before is None or newest < (before.newest or 0):
            self._models[model] = Offered(next(self._epochs), newest)
        else:
            self._models[model] = Offered(before.epoch, newest)
        self._news.set()
        self._news = asyncio.Event()
