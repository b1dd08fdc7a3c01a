"""Repeats of a request in any protocol: retries get the same sample, others a new one."""

import asyncio
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollmesh.conformance.checks import Family
from rollmesh.conformance.server import Server, Streamed, need

_TWICE = "Trainers: one step of the agent is sampled and counted twice, and one sample is orphaned."


@dataclass(frozen=True, slots=True)
class Repeats:
    """The repeats of one protocol's requests."""

    path: str
    body: Callable[[Server, str], dict[str, Any]]
    """Makes a request that asks the given text."""
    said: Callable[[dict[str, Any]], Any]
    """Returns the text of a complete answer."""
    streamed_id: Callable[[Streamed], Any]
    """Returns the id of a streamed answer."""

    def family(self, protocol: str) -> Family:
        """Returns the checks."""
        family = Family(f"{protocol}.retries")
        add = family.add
        add(
            "idempotency-key",
            "A repeat with its Idempotency-Key gets the same answer.",
            _TWICE,
            self._key,
        )
        add(
            "key-order",
            "A repeat with its Idempotency-Key may have its keys in another order.",
            "Trainers with agents as Codex, whose retries are equal after parsing and not in "
            "bytes: they sample twice, or get a 400.",
            self._order,
        )
        add(
            "key-reused",
            "An Idempotency-Key with another body is refused.",
            "Agents with a bug in their keys: they would get the answer to another question.",
            self._reused,
        )
        add(
            "sdk-retry",
            "A repeat that the SDK marks with x-stainless-retry-count gets the same answer.",
            _TWICE,
            self._sdk,
        )
        add(
            "retry-in-flight",
            "A repeat that arrives while the first is sampled joins it.",
            "Trainers and budgets: a client with a timeout has one turn sampled three times.",
            self._in_flight,
        )
        add(
            "other-form",
            "A retry may want as a stream what was answered as a whole.",
            "Agents that fall back from one form to the other: what they lost is sampled again.",
            self._other_form,
        )
        add(
            "unmarked-repeat",
            "The same request without a mark, after the answer arrived, is a new sample.",
            "Groups of samples: an agent that asks eight times would get one answer eight times.",
            self._unmarked,
        )
        return family

    async def _answer(
        self, server: Server, body: Any, headers: Mapping[str, str]
    ) -> dict[str, Any]:
        return (await server.post(self.path, body, headers)).body()

    def _same(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        ids = (first.get("id"), second.get("id"))
        need(ids[0] == ids[1], f"the retry is another answer: its id is {ids[1]!r}, not {ids[0]!r}")
        need(self.said(first) == self.said(second), "the retry has the same id and says other")

    async def _key(self, server: Server) -> None:
        body, key = self.body(server, "Named. What is 6 times 7?"), _key()
        self._same(await self._answer(server, body, key), await self._answer(server, body, key))

    async def _order(self, server: Server) -> None:
        body, key = self.body(server, "Ordered. What is 6 times 7?"), _key()
        first = await self._answer(server, body, key)
        self._same(first, await self._answer(server, dict(reversed(body.items())), key))

    async def _reused(self, server: Server) -> None:
        key = _key()
        await self._answer(server, self.body(server, "One. What is 6 times 7?"), key)
        other = await server.post(self.path, self.body(server, "Two. What is 6 times 7?"), key)
        need(400 <= other.status < 500, f"the other body is answered with status {other.status}")

    async def _sdk(self, server: Server) -> None:
        body = self.body(server, "Marked. What is 6 times 7?")
        first = await self._answer(server, body, _retry(0))
        self._same(first, await self._answer(server, body, _retry(1)))

    async def _in_flight(self, server: Server) -> None:
        body, key = self.body(server, "Joined. What is 6 times 7?"), _key()
        first, *others = await asyncio.gather(
            *(self._answer(server, body, {**key, **_retry(at)}) for at in range(3))
        )
        for other in others:
            self._same(first, other)

    async def _other_form(self, server: Server) -> None:
        body, key = self.body(server, "Formed. What is 6 times 7?"), _key()
        first = await self._answer(server, body, key)
        streamed = await server.stream(self.path, {**body, "stream": True}, key)
        streamed.datas()
        found = self.streamed_id(streamed)
        need(found == first.get("id"), f"the stream's id is {found!r}, not {first.get('id')!r}")

    async def _unmarked(self, server: Server) -> None:
        body = self.body(server, "Again. What is 6 times 7?")
        first, second = [await self._answer(server, body, {}) for _ in range(2)]
        need(first.get("id") != second.get("id"), f"both answers have the id {first.get('id')!r}")


def _key() -> dict[str, str]:
    return {"idempotency-key": f"conformance-{uuid.uuid4().hex}"}


def _retry(count: int) -> dict[str, str]:
    return {"x-stainless-retry-count": str(count)}
