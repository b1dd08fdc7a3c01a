"""Rollouts: prompts into samples, with attempts, supervision and scoring."""
