"""A trainer that is killed and restored, beside an undisturbed one: `make bench-restart`."""
