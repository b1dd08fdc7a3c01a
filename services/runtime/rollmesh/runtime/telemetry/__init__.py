"""Logs and metrics, the same in every service.

May import `runtime.config` and `runtime.errors`.
"""
