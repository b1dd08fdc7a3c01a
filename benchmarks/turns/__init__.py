"""Turns through the mesh and a peer: `make bench-turns`."""
