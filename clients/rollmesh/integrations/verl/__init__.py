"""verl: its agent loop manager, reward loop and weights, and the rows of its TransferQueue.

`manager` and `weights` are named in verl's configuration. `queue` works without verl.
May import `client`, `batches` and `runtime`.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
