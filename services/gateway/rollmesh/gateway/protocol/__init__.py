"""Between the messages of `rollmesh.v1` and the gateway's own types; imports no session."""
