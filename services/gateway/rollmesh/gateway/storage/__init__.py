"""The journal on disk and the outbox to the collector.

May import `export`, `protocol` and `conversation`.
"""
