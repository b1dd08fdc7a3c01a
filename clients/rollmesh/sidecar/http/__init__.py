"""The HTTP server: connections and their bounds, HTTP/1.1, and TLS.

May import `paths`, `turns.protocol`, `errors`, `metrics` and `config` of the sidecar.
"""
