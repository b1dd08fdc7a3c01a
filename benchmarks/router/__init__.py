"""What leases cost and what the router's policies do to rollouts."""
