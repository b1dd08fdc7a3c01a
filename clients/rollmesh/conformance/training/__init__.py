"""Checks of the record of a session, as a trainer is given it, beside its answers."""
