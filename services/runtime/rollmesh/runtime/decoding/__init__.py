"""Decodes images of strangers in processes that may die."""

from rollmesh.runtime.doors import door

__getattr__, __dir__ = door(__name__)
