"""What the scripted model says to agents that multiply, and when."""

CALL = (
    '<tool_call>\n{"name": "calculator", "arguments": {"a": 6,  "b":7.0, "s": "/"}}\n</tool_call>'
)
OTHER = '<tool_call>\n{"name": "calculator", "arguments": {"a": 1E2, "b": 2}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "calculator", "arguments": {"a": 6, "b": \n</tool_call>'
REPLIES = [
    f"<think>\nI take the tool.\n</think>\n\n I will compute.\n\n{CALL}\n{OTHER}",
    "<think>\nAdd nothing.\n</think>\n\n  It is 42. \n",
    "You are welcome.",
]
RULES = [
    ("compute", REPLIES[0]),
    ("100\n</tool_response>", REPLIES[1]),
    ('{"result":100}\n</tool_response>', REPLIES[1]),
    ("thanks", REPLIES[2]),
    ("broken", BROKEN),
    ("6\n</tool_response>", "It is 6."),
    ("stop here", "one two three four"),
    ("plain", "The answer is 42."),
]
