"""Chat templates and answers, exact to the token: messages to ids, sampled ids to calls.

A library of its own: no grpc, no sockets, no sessions. It imports `runtime` for arrays, errors and
bounded caches; vLLM runs only in the worker process of `parsing.vllm`.
"""
