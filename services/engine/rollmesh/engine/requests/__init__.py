"""Reading of requests: sampling parameters, constraints and weight transfers, checked."""
