"""The `rollmesh` command. `__main__` imports the standard library only.

May import everything, and does so when a command is called.
"""
