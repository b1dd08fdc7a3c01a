"""What an answer may be: structured output for forced calls and JSON, and masked tokens.

May import `parsing` and `tokenizer`.
"""
