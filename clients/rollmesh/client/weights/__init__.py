"""Weights to the engines: pushes of tensors, files and transfers."""
