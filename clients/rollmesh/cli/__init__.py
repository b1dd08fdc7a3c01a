"""The `rollmesh` command; `__main__` imports the standard library only."""
