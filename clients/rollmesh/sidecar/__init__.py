"""The sidecar: OpenAI's, Anthropic's and Google's HTTP APIs in front of the gateways.

Read first: `turn`, `chat`, `gateways`, `app`.

`turn` is one request, from its head to its answer. `chat` is a protocol, `gateways` has the calls
and `app` the routes. `messages`, `responses` and `google` are the other protocols, `body` reads
values for all of them, and `http` bounds connections. `relay` is another process.

May import `mesh`, `runtime` and `v1`. The names below are for other rooms and for tests. They are
loaded on first use, because settings are read where the sidecar's packages are not installed.
"""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
