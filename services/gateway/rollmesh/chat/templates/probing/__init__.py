"""Probes a chat template when it is loaded: what it prints, and whether it can be continued.

May import the modules of `templates` but `continuation`.
"""
