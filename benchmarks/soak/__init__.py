"""A mesh under mixed load, hostile requests and kills: hours of wear in minutes."""
