"""The lists of which the pairs are made: control calls, long operations, and failures."""

import asyncio
import itertools
import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import numpy as np
import openai

from tests.audited import Agent
from tests.engine.engines import CONFIG
from tests.pairs.meshwork import LONG, TENSORS, Meshwork

Step = Callable[[Meshwork], Awaitable[object]]
Operation = Callable[[Meshwork, list[Agent], asyncio.Event], Awaitable[None]]
"""Takes the mesh, the agents whose answers are audited, to which it adds its own, and what it sets
when it is in its middle."""
_VERSIONS = itertools.count(1)
FIRST: list[Any] = [{"role": "user", "content": "first"}]


async def _take_over(work: Meshwork) -> None:
    await work.replace("gateway-0", signal.SIGKILL)


async def _reload(work: Meshwork) -> None:
    """Changes the tokens of two roles, as docs/security.md says."""
    await work.rotate("sidecar", ["gateway-0", "gateway-1"])
    await work.rotate("trainer", ["gateway-0", "gateway-1", "router-0", "router-1", "collector"])


async def _revoke(work: Meshwork) -> None:
    """Ends the key of a session: it opens nothing any more, and the next key does."""
    agent = await work.answered()
    old = work.agent(agent.session)
    await work.client.revoke_key(agent.session)
    try:
        await old.chat.completions.create(model="policy", messages=FIRST)
    except openai.AuthenticationError:
        await agent.run(lambda: len(agent.answers) < 2)
        await work.client.close_session(agent.session)
    else:
        raise AssertionError("a revoked key opened its session")


async def _adapter(work: Meshwork) -> None:
    """Pushes an adapter, lets a session sample with it, and unloads it."""
    try:
        await work.client.push_adapter(TENSORS, "math", next(_VERSIONS), CONFIG)
        agent = Agent(await work.open("math"))
        await agent.run(lambda: not agent.answers)
        await work.client.close_session(agent.session)
    finally:
        await work.client.unload_adapter("math")


async def _score(work: Meshwork) -> None:
    """Has given tokens scored, as those of a student under its teacher."""
    rows = [np.arange(5, 25 + at, dtype=np.uint32) for at in range(8)]
    scores = await work.client.score(rows, top_k=2, timeout_s=60.0)
    assert [len(one.logprobs) for one in scores] == list(map(len, rows))


CONTROLS: dict[str, Step] = {
    "pause": lambda work: work.client.pause_engines(),
    "pause-abort": lambda work: work.client.pause_engines("abort"),
    "pause-wait": lambda work: work.client.pause_engines("wait"),
    "resume": lambda work: work.client.resume_engines(),
    "update": lambda work: work.push(),
    "sleep": lambda work: work.client.sleep_engines(),
    "sleep-2": lambda work: work.client.sleep_engines(2),
    "abort": lambda work: work.client.abort_generations(),
    "drain": lambda work: work.replace("engine-1", signal.SIGTERM),
    "stop": lambda work: work.replace("gateway-1", signal.SIGTERM),
    "reload": _reload,
    "revoke": _revoke,
    "takeover": _take_over,
    "adapter": _adapter,
    "score": _score,
}


async def _generate(work: Meshwork, agents: list[Agent], began: asyncio.Event) -> None:
    """Streams a long answer, and asks for it again if the stream was cut."""
    agent = Agent(await work.open())
    client = work.agent(agent.session)
    messages: list[Any] = [{"role": "user", "content": "long"}]
    text = ""
    try:
        async for chunk in await client.chat.completions.create(
            model="policy", messages=messages, stream=True
        ):
            agent.answers = [chunk.id]
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            if text:
                began.set()
    except openai.APIError:
        again = await client.chat.completions.create(model="policy", messages=messages)
        agent.answers, text = [again.id], again.choices[0].message.content or ""
    assert text == LONG
    agents.append(agent)


async def _push(work: Meshwork, agents: list[Agent], began: asyncio.Event) -> None:
    began.set()
    await work.push({f"w{at}": np.zeros(1 << 20, np.float32) for at in range(4)})


async def _ingest(work: Meshwork, agents: list[Agent], began: asyncio.Event) -> None:
    closed = await asyncio.gather(*(work.answered() for _ in range(6)))
    began.set()
    agents += closed
    await asyncio.gather(*(work.client.close_session(agent.session) for agent in closed))


async def _deliver(work: Meshwork, agents: list[Agent], began: asyncio.Event) -> None:
    """Receives sessions one by one, each once."""
    closed = await asyncio.gather(*(work.answered() for _ in range(4)))
    agents += closed
    await asyncio.gather(*(work.client.close_session(agent.session) for agent in closed))
    missing = {agent.session.session_id for agent in closed}
    async with work.client.subscribe("slow", unit="session", credits=1) as deliveries:
        began.set()
        while missing:
            delivery = await anext(deliveries)
            await deliveries.acknowledge(delivery)
            missing -= {session.session_id for session in delivery.sessions}


async def _be_taken_over(work: Meshwork, agents: list[Agent], began: asyncio.Event) -> None:
    """Goes on with sessions of a gateway that is killed."""
    mine = await asyncio.gather(*(work.answered() for _ in range(4)))
    agents += mine
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(work.replace("gateway-1", signal.SIGKILL))
        began.set()
        for agent in mine:
            tasks.create_task(_one_more(agent))


async def _one_more(agent: Agent) -> None:
    last = len(agent.answers)
    await agent.run(lambda: len(agent.answers) == last)


async def _close(work: Meshwork, agents: list[Agent], began: asyncio.Event) -> None:
    """Closes a session of some hundred turns."""
    agent = await work.answered()
    client = work.agent(agent.session)
    for _ in range(3):
        answer = await client.chat.completions.create(model="policy", messages=FIRST, n=64)
        agent.answers.append(answer.id)
    agents.append(agent)
    began.set()
    await work.client.close_session(agent.session)


OPERATIONS: dict[str, Operation] = {
    "generation": _generate,
    "push": _push,
    "ingest": _ingest,
    "delivery": _deliver,
    "takeover": _be_taken_over,
    "close": _close,
}


async def _freeze(name: str, work: Meshwork) -> None:
    """Stops a service where it is until a session can be opened and answered without it."""
    process = work.mesh.processes[name]
    process.freeze()
    try:
        agent = await work.answered()
    finally:
        process.thaw()
    await work.client.close_session(agent.session)


async def _kill(name: str, work: Meshwork) -> None:
    await work.replace(name, signal.SIGKILL)


FAILURES: dict[str, Step] = {
    f"{how.__name__[1:]} {name}": partial(how, name)
    for how, names in (
        (_kill, ("engine-0", "gateway-0", "router-0", "collector", "sidecar")),
        (_freeze, ("engine-1", "gateway-1", "router-1")),
    )
    for name in names
}
