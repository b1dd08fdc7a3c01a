"""`rollmesh up`: a whole mesh on this machine, planned and supervised."""
