"""Sessions, and what the mesh knows of them: trajectories, trees, tokens, transcripts."""
