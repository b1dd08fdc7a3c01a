"""The viewer: a process that reads a mesh and shows its runs, groups, sessions and tokens.

Read first: `index`, `app`. It writes nothing to the mesh, and may be killed at any time.

May import `client`, `runtime` and `v1`.
"""

from rollmesh.view.app import Viewer, ViewSettings
from rollmesh.view.index import Index, Selection

__all__ = ["Index", "Selection", "ViewSettings", "Viewer"]
