"""SIGKILL at every boundary; afterwards every answered turn must have arrived exactly once."""
