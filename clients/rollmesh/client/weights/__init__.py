"""Weights for the engines: pushes of tensors, checkpoints and transfers through the router.

May import `sessions`, `connections`, and the modules below them.
"""
