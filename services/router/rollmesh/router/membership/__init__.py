"""Who is in the mesh."""
