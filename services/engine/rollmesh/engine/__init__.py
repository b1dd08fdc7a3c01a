"""The engine: token-level generation over one model replica.

Read first: `service`, `generations`, `control`, `backend`.

May import `mesh`, `runtime` and `v1`. Only `engine.vllm` imports vLLM and torch.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
