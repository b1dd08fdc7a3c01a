"""Decodes images of strangers in processes that may die."""

from rollmesh.runtime.doors import door

__getattr__ = door(__name__)
