"""Fields of a request's body that several protocols read alike: sampling, tools, text formats.

Imports nothing else of the sidecar.
"""
