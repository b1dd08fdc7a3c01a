"""Generations that a router runs itself, for clients of engines that are pointed at it."""
