"""vLLM's own tool parsers, in a worker process, for formats without a parser here.

May import `parsing`. Only `worker` imports vLLM, and nobody imports `worker`.
"""
