"""Load measurements against a peer, on one machine."""
