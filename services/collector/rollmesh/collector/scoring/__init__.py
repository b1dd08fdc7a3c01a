"""Scorers: functions and services that give rewards to stored sessions.

May import `delivery` and `storage`.
"""
