"""Weights: updates of engines, and what is kept for engines that come late."""
