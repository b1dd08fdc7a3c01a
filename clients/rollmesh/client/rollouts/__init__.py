"""The rollout engine: samples become groups of sessions, with attempts, time limits and scoring.

May import everything else in `rollmesh.client` except `sync`.
"""
