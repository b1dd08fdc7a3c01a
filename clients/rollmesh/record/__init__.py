"""The open record of a run: sessions, their trees and tokens as Parquet, and converters of it.

`rollmesh export` and `rollmesh archive` write a folder, `read_sessions` reads its sessions, and
`rollmesh.batches.rows_of` makes rows of them. docs/record.md has the schema.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
