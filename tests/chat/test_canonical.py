import tracemalloc
from time import thread_time

from rollmesh.chat import ChangedEcho, Message, fingerprint, make_context
from rollmesh.chat.parsing import tool_schemas

TOOLS = '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'


def test_tools_that_come_with_every_request_are_read_once() -> None:
    # Two objects that are equal, as two requests give them.
    first, second = TOOLS.encode(), TOOLS.encode()
    assert tool_schemas(first) is tool_schemas(second)


def test_a_fingerprint_tells_requests_apart_by_each_of_its_parts() -> None:
    bare, tools = make_context(b"", b""), make_context(TOOLS.encode(), b"")
    parts = [(bare, b"m", [1]), (tools, b"m", [1]), (bare, b"n", [1]), (bare, b"m", [2])]
    assert len({fingerprint(*part) for part in parts}) == len(parts)
    assert fingerprint(*parts[0]) == fingerprint(bare, b"m", [1])


def test_tools_of_megabytes_are_kept_up_to_a_bound() -> None:
    function = '{"type": "function", "function": {"name": "f", "description": "%s"}}'

    def names(at: int) -> set[str]:
        return set(tool_schemas(f"[{function % (str(at) * 1_000_000)}]".encode()))

    tracemalloc.start()
    try:
        assert all(names(at) == {"f"} for at in range(40))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 40_000_000


def test_an_echo_of_blanks_behind_a_fold_without_an_end_is_read_quickly() -> None:
    begun = thread_time()
    ChangedEcho(Message("assistant", f"<details>{' ' * 100_000}x"))
    assert thread_time() - begun < 2  # a minute if each blank were tried as the last
