"""Scorers: functions and services that give rewards to stored sessions."""
