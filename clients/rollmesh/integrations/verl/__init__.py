"""verl: an agent-loop manager, rewards, weights and the rows of its queue."""
