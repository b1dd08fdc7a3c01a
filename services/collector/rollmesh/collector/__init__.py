"""The collector: durable sessions, groups, and their delivery to trainers."""
