"""Checks of OpenAI's Responses, one module for each subject."""
