"""The viewer: a process that reads a mesh, a record or both, and shows sessions and tokens.

Read first: `index`, `app`. It writes nothing to the mesh, and may be killed at any time.

May import `batches`, `client`, `record`, `runtime` and `v1`.
"""

from rollmesh.view.app import Viewer, ViewSettings
from rollmesh.view.index import Index, Selection
from rollmesh.view.mesh import History
from rollmesh.view.sessions import closed_session, running_session

__all__ = [
    "History",
    "Index",
    "Selection",
    "ViewSettings",
    "Viewer",
    "closed_session",
    "running_session",
]
