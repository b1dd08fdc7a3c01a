"""Scorers: functions and services that give stored sessions their rewards.

May import `delivery` and `storage`.
"""
