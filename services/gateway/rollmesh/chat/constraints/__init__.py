"""Structured output, for tool calls and JSON, and masked tokens.

May import `parsing` and `tokenizer`.
"""
