"""Decodes images of strangers in processes that may die."""
