"""The backend that runs vLLM: its options, its start, its failures, its weights.

The only package besides `chat.parsing.vllm.worker` that imports vLLM or torch.
"""
