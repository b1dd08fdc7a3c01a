"""The gateway: turns the chat requests of agents into exact token sequences.

Layers, of which each imports only those below it:

    __main__
    service | commands    a process; command-line tools
    servicer              RPCs
    sessions              sessions from creation to close
    turns                 one turn: prompt, lease, generation, commit
    storage               the journal, and the outbox to the collector
    export                a closed session as a record
    protocol              requests in, responses out
    metrics
    conversation          the state of a session: its tree, its turns
"""
