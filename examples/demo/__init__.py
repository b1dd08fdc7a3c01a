"""The demo: a small policy learns to use a tool through the complete mesh."""
