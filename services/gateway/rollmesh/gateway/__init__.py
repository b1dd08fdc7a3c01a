"""The gateway: turns agents' chat requests into exact token sequences.

Modules, each of which imports only those below it:

    __main__
    service | commands    the process, and command-line tools
    servicer              RPCs
    tenancy               the journals that a gateway serves
    registry              the sessions of one journal: opening, turns, replies, closing
    upstream              one turn that a server elsewhere answers
    turn                  one turn: prompt, lease, generation, commit
    prompt                the prompt of a turn
    deps                  the dependencies of turns
    outbox                closed sessions on their way to the collector
    postgres              journals in a database that gateways share
    journal               open sessions in a journal, and a journal in a file
    export                the record of a closed session
    responses, requests   the messages of the contract
    metrics
    session               the state of a session, its turns and its limits
    conversation          messages and images of requests
    lineage               the lineage of each branch
    tree                  the conversation tree of a session

Read first: `turn`, `prompt`, `session`.

Outside itself it may import `chat`, `mesh`, `runtime` and `v1`.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
