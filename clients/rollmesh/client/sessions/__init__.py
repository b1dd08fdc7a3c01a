"""Sessions, open and closed: opening and closing them, rewards, transcripts, trajectories, trees.

May import `connections` and the modules below it.
"""
