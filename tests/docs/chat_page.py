"""Surroundings of the example in docs/chat.md: a scripted engine, and checks."""

SETUP = """
from tokenizers import Tokenizer

tools = [{"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}}]
says = [
    '<tool_call>\\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\\n</tool_call>',
    "It is 42.",
]
seen, sampled = [], []


def generate(prompt, stop_token_ids):
    tokenizer = Tokenizer.from_file(model_path + "/tokenizer.json")
    seen.append(prompt.tolist())
    sampled.append([*tokenizer.encode(says[len(sampled)]).ids, stop_token_ids[0]])
    for id_ in sampled[-1]:
        yield [id_]

"""
CHECK = """
first = seen[0] + sampled[0]
assert seen[1][: len(first)] == first
assert conversation.token_ids.tolist() == seen[1] + sampled[1]
assert conversation.answer == {"role": "assistant", "content": "It is 42."}
assert not conversation.malformed
"""
