"""What the scripted model says to each agent: what was said last, and the reply as sampled.

Everything that agents do not echo as it was is in here: reasoning, white space around the text, and
arguments as no serialiser would write them.
"""

from datetime import datetime, timedelta


def call(arguments: str, name: str = "calculator") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def result(text: str) -> str:
    """The end of a prompt whose last message is a tool's result that ends with `text`."""
    return f"{text}\n</tool_response>"


ODD = r'{"a": 6,  "b":7.0, "note": "caf\u00e9 "}'

# A question, two rounds of calls, an answer, and a second question in the same conversation.
QUESTION = "How much is it?"
LAST = "Thank you."
ANSWER = "  It is 126. \n"
FAREWELL = "You are welcome."
CHAT = [
    (QUESTION, f"<think>\nI take the tool.\n</think>\n\n I will compute.\n\n{call(ODD)}"),
    (
        result("42.0"),
        call('{"b": 2.0, "a": 42, "note": ""}') + "\n" + call('{"a": 1E2, "b":1.26,"note":"/"}'),
    ),
    (result("126.0"), f"<think>\nAdd nothing.\n</think>\n\n{ANSWER}"),
    (LAST, FAREWELL),
]

# Arguments that are not JSON. LangChain mends them when it streams, and runs the tool.
BROKEN_QUESTION = "And broken?"
BROKEN = [
    (
        BROKEN_QUESTION,
        '<tool_call>\n{"name": "calculator", "arguments": {"a": 6, "b": \n</tool_call>',
    ),
    (result("6.0"), "It is 6."),
]

# Three commands and the submission. The first one leaves a mark in the agent's folder.
TASK = "Write a greeting."
_SUBMIT = call('{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}', "bash")
MINI = [
    (
        "anything\n```",
        "<think>\nA file.\n</think>\n\n I write it.\n\n"
        + call(r'{"command":  "echo caf\u00e9 42 > greeting"}', "bash"),
    ),
    (
        result('"output": ""\n}'),
        call('{"command":"cat greeting"}', "bash") + "\n" + call('{"command": "echo two"}', "bash"),
    ),
    (result('two\\n"\n}'), _SUBMIT),
]

# The same agent under its prompts for SWE-bench: the first answer is not a call, and is dropped.
TALK = "Write nothing."
MINI_TALK = [
    ("</instructions>", "I would rather talk."),
    (" after that).", _SUBMIT),
]

# And with its commands in the text: no tools, and what they print comes as the user's words.
MINI_TEXT = [
    (
        "mswea_bash_command\nanything\n```",
        "<think>\nA file.\n</think>\n\nTHOUGHT: I write it. \n\n"
        "```mswea_bash_command\necho two > greeting\n```\n",
    ),
    (
        "<output>\n</output>",
        "```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```",
    ),
]

# The Claude agent SDK, with the tool on a server of its own. Its first question is followed by the
# date, which may become another one while the tests run.
_TODAY = datetime.now().astimezone().date()
_DAYS = [_TODAY + timedelta(days=days) for days in range(2)]
_SERVED = "mcp__math__calculator"
_COUNT = '{"description": "Count", "prompt": "Count it.", "subagent_type": "counter"'
_BEGUN = f"<think>\nI take the tool.\n</think>\n\n I will compute.\n\n{call(ODD, _SERVED)}"
_PAIR = (call('{"b": 2.0, "a": 42}', _SERVED), call('{"a": 1E2,  "b":1.26}', _SERVED))
COUNTED = "All is counted."
SDK = [
    *((f"Today's date is {day}.", _BEGUN) for day in _DAYS),
    (result("42.0 in all"), "\n".join(_PAIR)),
    *((result(f"{ended} in all"), ANSWER) for ended in ("84.0", "126.0")),
    (result("42.0 to count"), call(f'{_COUNT}, "run_in_background": false}}', "Agent")),
    (result("42.0 as counted"), "It is 42."),
    (result("</usage>"), COUNTED),
]

# The longer endings first: the first rule that fits gives the reply.
RULES = [*CHAT, *BROKEN, *MINI_TEXT, *MINI, *MINI_TALK, *SDK]
