import importlib
from pathlib import Path

import pytest
from google.protobuf import descriptor, message as protobuf_message, message_factory
from hypothesis import given, strategies as st

from tests.contract.rules import problems

FILES = sorted(Path("protos/rollmesh").rglob("*.proto"))
MODULES = [
    importlib.import_module(f"{'.'.join(path.parts[1:-1])}.{path.stem}_pb2") for path in FILES
]

GOOD = """\
// Serves.
service GoodService {
  // Does.
  rpc Do(DoRequest) returns (stream DoResponse);
}

// Asks.
message DoRequest {
  // How long, milliseconds.
  uint32 timeout_ms = 1;
  // How hot.
  optional float temperature = 2;
}

// Kind.
enum Kind {
  // Never sent.
  KIND_UNSPECIFIED = 0;
  // One.
  KIND_ONE = 1;
}
"""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_proto_file_keeps_the_rules(path: Path) -> None:
    assert problems(path.read_text()) == []


def test_a_good_file_has_no_problems() -> None:
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (("// Serves.\n", ""), "commented"),
        (("  // Does.\n", ""), "commented"),
        (("// Asks.\n", ""), "commented"),
        (("  // How hot.\n", ""), "commented"),
        (("  // One.\n", ""), "commented"),
        (("GoodService", "Good"), "service suffix"),
        (("(DoRequest)", "(OtherRequest)"), "own request and response"),
        (("(stream DoResponse)", "(DoRequest)"), "own request and response"),
        (("KIND_ONE", "ONE"), "enum prefix"),
        (("KIND_UNSPECIFIED = 0", "KIND_NONE = 0"), "zero is unspecified"),
        (("KIND_ONE = 1", "KIND_UNSPECIFIED = 1"), "zero is unspecified"),
        (("timeout_ms", "timeout"), "unit _ms"),
        (("optional float", "float"), "optional where zero counts"),
        (("optional float temperature", "string error"), "errors only as status"),
        (("optional float temperature", "ErrorReason error_reason"), "errors only as status"),
        (("optional float temperature", "string last_error"), "errors only as status"),
        (("optional float temperature", "bytes token_ids"), "dtype in the name"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_broken_file_is_found(change: tuple[str, str], rule: str) -> None:
    broken = GOOD.replace(*change)
    assert broken != GOOD
    assert rule in {problem.rule for problem in problems(broken)}


def _messages() -> list[descriptor.Descriptor]:
    return [message for m in MODULES for message in m.DESCRIPTOR.message_types_by_name.values()]


def test_no_request_or_response_is_used_by_two_rpcs() -> None:
    """Except in ControlEngines, which routers and engines serve alike."""
    used = [
        name
        for module in MODULES
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.full_name != "rollmesh.v1.RouterService.ControlEngines"
        for name in (method.input_type.full_name, method.output_type.full_name)
    ]
    assert len(used) == len(set(used)) > 30


@given(data=st.binary(max_size=200))
def test_rubbish_never_does_more_than_fail_to_parse(data: bytes) -> None:
    for message in _messages():
        cls = message_factory.GetMessageClass(message)
        try:
            parsed = cls.FromString(data)
        except protobuf_message.DecodeError:
            continue
        data_again = parsed.SerializeToString(deterministic=True)
        assert cls.FromString(data_again).SerializeToString(deterministic=True) == data_again
