"""Access to a service: roles, the secrets and certificates that show them, and their files.

May import `config`, `errors` and the modules of `runtime` itself.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
