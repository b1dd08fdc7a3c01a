"""One module for each way in which models write tool calls.

May import `parsing.events` and `json_values`.
"""
