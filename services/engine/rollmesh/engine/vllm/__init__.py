"""The backend that runs vLLM.

May import `engine.backend` and `engine.requests`. Only this package and
`chat.parsing.vllm.worker` import vLLM or torch.
"""
