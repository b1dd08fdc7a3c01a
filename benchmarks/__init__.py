"""Load measurements of the mesh and of peer systems, on one machine."""
