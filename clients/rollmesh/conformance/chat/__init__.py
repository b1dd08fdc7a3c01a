"""Checks of OpenAI's chat completions, one module for each subject."""
