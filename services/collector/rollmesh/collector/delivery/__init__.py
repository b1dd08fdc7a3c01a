"""Decisions of delivery: consumers, groups, filters, rewards and records; plain state, no I/O."""
