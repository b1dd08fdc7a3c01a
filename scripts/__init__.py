"""What maintainers run: generated pages, the reward curve, releases."""
