"""The collector: stores sessions durably, forms groups, and delivers both to trainers.

Layers; each imports only the ones below it:

    __main__
    service | commands    a process; command-line tools
    servicer | export     RPCs; files of stored sessions
    streams | scoring     subscriptions and maintenance; scoring before delivery
    storage               SQLite or PostgreSQL, behind one Protocol
    delivery              pure decisions, no I/O

Outside itself it may import `mesh`, `runtime` and `v1`.
"""
