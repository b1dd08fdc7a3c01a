"""Scoring: stored sessions get their rewards from a `ScorerService`.

May import `delivery` and `storage`.
"""
