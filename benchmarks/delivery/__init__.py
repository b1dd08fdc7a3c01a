"""Closed sessions from the outbox to tensors, and through TransferQueue: `make bench-delivery`."""
