"""Parses and validates requests: sampling parameters, constraints and weight transfers.

May import `engine.backend`.
"""
