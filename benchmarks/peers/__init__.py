"""The checks of training records at rollmesh and at other servers that record for trainers."""
