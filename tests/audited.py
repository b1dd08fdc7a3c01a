"""Agents whose answers are counted, and a trainer that receives them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI

from examples.demo.audit import Audit
from rollmesh.client import Client, Session
from tests.waiting import until

RETRIES = 20
"""Of an agent whose sidecar is lost. Anything else is waited for by the sidecar."""
RULES = [("first", "The answer is 42."), ("next", "I am not sure. " * 4)]
"""What scripted engines answer them."""


class Agent:
    """Asks, and goes on with each answer."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.answers: list[str] = []

    async def run(self, goes_on: Callable[[], bool]) -> None:
        """Asks until it may stop."""
        messages: list[Any] = []
        async with AsyncOpenAI(
            base_url=self.session.base_url, api_key=self.session.api_key, max_retries=RETRIES
        ) as openai:
            while goes_on():
                said = "next" if messages else "first"
                messages.append({"role": "user", "content": said})
                reply = await openai.chat.completions.create(model="policy", messages=messages)
                self.answers.append(reply.id)
                messages.append(reply.choices[0].message)


async def deliver(client: Client, agents: list[Agent]) -> Audit:
    """Reads as a trainer until all sessions have come."""
    audit = Audit(answered={id_ for agent in agents for id_ in agent.answers})
    missing = {agent.session.session_id for agent in agents}
    async with client.subscribe("audit", unit="session") as deliveries, asyncio.timeout(300):
        while missing:
            delivery = await anext(deliveries)
            await deliveries.acknowledge(delivery)
            audit.received(delivery.sessions)
            missing -= {session.session_id for session in delivery.sessions}
    return audit


@asynccontextmanager
async def agents_go_on(client: Client, count: int) -> AsyncIterator[list[Agent]]:
    """Agents ask while the block runs, and once after it. Then each answer was trained once."""
    agents = [Agent(await client.open_session(client.session_request())) for _ in range(count)]
    may_end = False
    ended: list[int] = []

    async def run(agent: Agent) -> None:
        await agent.run(lambda: not may_end or len(agent.answers) == ended[agents.index(agent)])

    async with asyncio.timeout(600), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(run(agent)) for agent in agents]
        await until(lambda: all(agent.answers for agent in agents), 300)
        yield agents
        assert not any(task.done() for task in running)
        ended = [len(agent.answers) for agent in agents]
        may_end = True
    for agent in agents:
        await client.close_session(agent.session)
    audit = await deliver(client, agents)
    assert (audit.lost, audit.duplicated, audit.drift_tokens) == (0, 0, 0)
    assert audit.trained.keys() >= audit.answered
