"""A server of verifiers' interception sessions, run by the Python that has verifiers.

    python benchmarks/peers/intercept.py ENGINE_URL MODEL_FOLDER PORT

Without a folder, requests are passed on as they are, which is no way to train.
verifiers opens a session for each rollout in its own process. This does what its
`serve_interception` and `Rollout` do, by HTTP:

    POST   /sessions       sampling parameters: {"id", "base_url", "key"}
    DELETE /sessions/{id}  ends it: the branches of its trace, node by node
"""

import sys
from contextlib import AsyncExitStack
from typing import Any

from aiohttp import web
from renderers import Qwen3RendererConfig
from verifiers.v1 import TaskData
from verifiers.v1.clients import ClientConfig, EvalClientConfig, ModelContext, TrainClientConfig
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import SamplingConfig


def application(engine: str, model: str) -> web.Application:
    """Returns the routes. The engine's URL has no path."""
    client: ClientConfig = EvalClientConfig(base_url=f"{engine}/v1")
    if model:
        client = TrainClientConfig(
            base_url=f"{engine}/v1",
            renderer=Qwen3RendererConfig(thinking_retention="all"),
            renderer_model_name=model,
        )
    interception = InterceptionServer()
    sessions: dict[str, tuple[Trace, AsyncExitStack]] = {}

    async def running(_app: web.Application) -> Any:
        async with interception:
            yield

    async def opened(request: web.Request) -> web.Response:
        sampling = SamplingConfig(**await request.json())
        context = ModelContext(model="policy", client=client, sampling=sampling)
        task = TraceTask(type="Task", data=TaskData(idx=0, prompt=""))
        trace = Trace(task=task, agent=AgentInfo(config=AgentConfig()))
        stack = AsyncExitStack()
        session = RolloutSession(ctx=context, trace=trace)
        url, key, _ = await stack.enter_async_context(interception.acquire(session))
        sessions[trace.id] = trace, stack
        return web.json_response({"id": trace.id, "base_url": f"{url}/v1", "key": key})

    async def closed(request: web.Request) -> web.Response:
        trace, stack = sessions.pop(request.match_info["id"])
        await stack.aclose()
        return web.json_response([_branch(one) for one in trace.branches])

    app = web.Application()
    app.cleanup_ctx.append(running)
    app.router.add_post("/sessions", opened)
    app.router.add_delete("/sessions/{id}", closed)
    return app


def _branch(found: Any) -> dict[str, Any]:
    """Returns a branch: its calls are those of its sampled nodes, in order."""
    finishes = iter([one.finish_reason for one in found.calls])
    nodes = [
        {
            "token_ids": one.token_ids,
            "mask": one.mask,
            "logprobs": one.logprobs,
            "finish_reason": next(finishes, None) if one.sampled else None,
            "links": [link.type for link in one.semantic_parents],
            "sampled": one.sampled,
        }
        for one in found.nodes
    ]
    return {"index": found.index, "trainable": found.trainable, "nodes": nodes}


if __name__ == "__main__":
    web.run_app(application(*sys.argv[1:3]), host="127.0.0.1", port=int(sys.argv[3]), print=None)
