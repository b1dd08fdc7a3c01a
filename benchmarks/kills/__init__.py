"""SIGKILL at every boundary. Afterwards every answered turn must have arrived exactly once."""
