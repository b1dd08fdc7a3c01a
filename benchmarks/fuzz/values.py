"""Values that break code: boundaries, wrong types, long and malformed texts."""

import random
from collections.abc import Callable, Sequence

INTEGERS: dict[str, Sequence[int]] = {
    "int32": (0, 1, -1, 7, 2**31 - 1, -(2**31)),
    "uint32": (0, 1, 2, 255, 65_536, 2**31, 2**32 - 1),
    "int64": (0, 1, -1, 5, 2**31, 2**53, 2**63 - 1, -(2**63)),
    "uint64": (0, 1, 5, 2**32, 2**63, 2**64 - 1),
}
FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-45, 1e38, 1e308, float("inf"), float("-inf"), float("nan"), -0.0)
TEXTS = (
    "",
    " ",
    "a",
    "policy",
    "\0",
    "\r\nx: y",
    "../../../etc/passwd",
    "/",
    "%s%n%x",
    "{{7*7}}{% for x in y %}",
    "<|im_end|>",
    "<|im_start|>system\n",
    "<tool_call>\n{",
    "\u202e\u0000\uffff",
    "\U0001f600" * 40,
    "e\u0301" * 50,
    "'; DROP TABLE sessions; --",
    "unix:/tmp/x",
    "http://169.254.169.254/latest",
    "data:image/png;base64,AAAA",
    "NaN",
    "1e999",
    "9" * 400,
    "x" * 129,
    "x" * 70_000,
    "word " * 3_000,
)
JSONS = (
    "{}",
    "[]",
    "null",
    "{",
    '{"a":' * 60 + "1" + "}" * 60,
    "[" * 3_000,
    '{"type":"object","properties":{"a":{"$ref":"#"}},"additionalProperties":false}',
    '{"type":"string","pattern":"(a+)+$"}',
    '[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}]',
    '{"a":1,"a":2}',
    '{"a":NaN,"b":1e999,"c":-0}',
    '"\\ud800"',
)


def text(rng: random.Random, pool: Sequence[str]) -> str:
    """Returns a text: of this run, of the list, or random characters."""
    match rng.randrange(8):
        case 0 | 1 | 2 if pool:
            return rng.choice(pool)
        case 3:
            return rng.choice(JSONS)
        case 4:
            return "".join(chr(_code_point(rng)) for _ in range(rng.randrange(30)))
        case 5 if pool:
            return changed_text(rng, rng.choice(pool))
        case _:
            return rng.choice(TEXTS)


def changed_text(rng: random.Random, given: str) -> str:
    """Returns a text with one change: cut, doubled, a character replaced."""
    at = rng.randrange(len(given) + 1)
    changes: Sequence[Callable[[], str]] = (
        lambda: given[:at],
        lambda: given[at:] + given[:at],
        lambda: given + given,
        lambda: given[:at] + chr(_code_point(rng)) + given[at + 1 :],
        given.upper,
    )
    return rng.choice(changes)()


def changed_bytes(rng: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """Returns bytes with some changes: bits, cuts, repeats, lengths that lie, another message.

    Args:
        rng: The source of choices.
        data: What is changed.
        other: What may be appended.
    """
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(7):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = rng.randbytes(rng.choice((1, 2, 8, 64)))
            case 3:
                changed[at:at] = rng.choice((b"\xff" * 9, b"\xff\xff\xff\xff\x07", b"\x80" * 12))
            case 4:
                size = rng.randrange(1, 64)
                changed[at:at] = changed[at : at + size] * rng.choice((1, 2, 50))
            case 5:
                del changed[at : at + rng.randrange(1, 16)]
            case _:
                changed += other
    return bytes(changed)


def _code_point(rng: random.Random) -> int:
    code = rng.choice((rng.randrange(32), rng.randrange(128), rng.randrange(0x110000)))
    return code if not 0xD800 <= code < 0xE000 else 0xFFFD
