"""Weights: updates of engines, and weights kept for engines that join later.

May import `leasing`, `membership`, `engine_calls` and `config`.
"""
