"""Logs, metrics and traces, the same in every service.

May import `runtime.access`, `codec`, `config`, `errors` and `runs`.
"""
