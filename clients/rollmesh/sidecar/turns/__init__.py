"""One turn over HTTP, whatever protocol the agent speaks: its session, its answer or its stream.

Each protocol is a package beside this one that implements `protocol.Protocol`; no protocol imports
another. May import `fields`, `gateways`, `metrics`, `errors` and `config` of the sidecar.
"""
