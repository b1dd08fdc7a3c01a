"""The `rollmesh` command."""
