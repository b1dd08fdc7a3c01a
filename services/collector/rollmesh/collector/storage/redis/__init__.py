"""The store in Redis, which several collectors may share."""
