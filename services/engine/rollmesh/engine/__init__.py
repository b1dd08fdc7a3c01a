"""The engine: token-level generation over one model replica.

May import `mesh`, `runtime` and `v1`; only `engine.vllm` imports vLLM and torch.
"""
