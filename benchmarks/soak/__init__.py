"""Hours in minutes: a mesh under mixed load, hostile requests and kills, and what it costs it."""
