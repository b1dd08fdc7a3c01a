"""The router: membership, least-active sticky leases, control fan-out."""
