"""The HTTP door: what servers cost, and what they survive."""
