"""Subscriptions: what flows to consumers, and the maintenance beside it.

May import `delivery` and `storage`.
"""
