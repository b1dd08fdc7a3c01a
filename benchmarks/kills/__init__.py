"""SIGKILL at every boundary; then every answered turn must have arrived, once."""
