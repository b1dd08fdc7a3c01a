"""Exact continuation of a conversation through the model's own chat template.

May import `messages`, `canonical`, `json_values` and `tokenizer`, and `parsing` for reasoning tags.
"""
