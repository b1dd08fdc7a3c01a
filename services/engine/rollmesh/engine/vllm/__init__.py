"""The backend that runs vLLM.

May import `engine.backend` and `engine.requests`. Only this package and
`gateway.vllm_worker` import vLLM or torch.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
