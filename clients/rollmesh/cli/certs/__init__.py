"""`rollmesh certs`: a CA and certificates for a trial of TLS.

May import `runtime`.
"""
