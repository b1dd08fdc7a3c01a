"""The engine: token-level generation over one model replica."""
