"""Weights: updates of engines, and weights kept for engines that join later."""
