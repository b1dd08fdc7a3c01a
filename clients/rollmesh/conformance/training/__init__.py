"""Checks of what a trainer is given of an episode: the record of a session beside its answers."""
