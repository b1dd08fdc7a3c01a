"""The gateway: turns agents' chat requests into exact token sequences.

Layers, each of which imports only those below it:

    __main__
    service | commands    the process; command-line tools
    servicer              RPCs
    sessions              session lifecycle, from creation to close
    turns                 one turn: prompt, lease, generation, commit
    storage               the journal, and the outbox to the collector
    export                the record of a closed session
    protocol              reads requests, writes responses
    metrics
    conversation          the state of a session: its tree and its turns

Outside itself it may import `chat`, `mesh`, `runtime` and `v1`.
"""
