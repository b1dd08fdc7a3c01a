"""Checks of Anthropic's Messages, one module for each subject."""
