"""Consumers, their streams, and the maintenance that runs alongside them.

May import `delivery` and `storage`.
"""
