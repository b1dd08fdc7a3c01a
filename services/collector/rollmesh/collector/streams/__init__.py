"""Subscriptions, and the maintenance that runs beside them.

May import `delivery` and `storage`.
"""
