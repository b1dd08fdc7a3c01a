"""Closed sessions: subscriptions to a collector, and the calls that read and score its sessions.

May import `sessions`, `connections`, and the modules below them.
"""
