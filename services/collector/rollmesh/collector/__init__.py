"""The collector: stores sessions durably, forms groups, and delivers both to trainers.

Layers, of which each imports only those below it:

    __main__
    service | commands    a process; command-line tools
    servicer | export     RPCs; files of stored sessions
    streams | scoring     subscriptions and maintenance; rewards before delivery
    storage               SQLite or Redis, behind one Protocol
    delivery              decisions over plain state
"""
