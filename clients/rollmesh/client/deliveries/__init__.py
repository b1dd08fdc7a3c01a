"""Subscriptions to a collector: deliveries, and their acknowledgement."""
