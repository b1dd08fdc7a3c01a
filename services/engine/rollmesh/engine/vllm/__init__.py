"""The backend that runs vLLM.

May import `engine.backend` and `engine.requests`. Only this package and
`gateway.vllm_worker` import vLLM or torch.
"""
