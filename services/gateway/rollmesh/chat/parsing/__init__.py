"""Tool-call and reasoning parsers: sampled text in, events out, while it is sampled.

May import `messages`, `json_values` and `tokenizer`. Never `templates`.
"""
