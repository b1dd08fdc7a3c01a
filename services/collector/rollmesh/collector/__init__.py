"""The collector: stores sessions durably, forms groups, and delivers both to trainers.

A session changes form three times here: the record that arrives, its head and arrays in the store,
and the delivery that a trainer receives. Its modules:

    log       pure decisions: units, groups, filters, consumers' settings
    store     tables and transactions, over `sqlite` or `postgres`
    streams   which units each stream of a consumer gets
    service   the RPCs, deadlines and retention, and the process

Read first: `log`, `streams`.

`scoring` calls a scorer and the engines of teachers before delivery. `commands` and `export` are
command-line tools. Other packages and tests import only the names below. It may import
`mesh`, `runtime` and `v1`.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
