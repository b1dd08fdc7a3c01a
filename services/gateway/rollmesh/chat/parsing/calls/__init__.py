"""One module for each way in which models write tool calls.

May import `parsing.parser` and `json_values`.
"""
