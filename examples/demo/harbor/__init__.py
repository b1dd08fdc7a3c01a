"""The demo's agents as rollouts of a Harbor server, whose relay is cut ten times meanwhile."""
