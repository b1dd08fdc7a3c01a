"""Who opens gRPC channels: one module, which dials TCP only, and the probe of the own host."""

import ast
from pathlib import Path

CHANNELS = Path("services/runtime/rollmesh/runtime/rpc/channels.py")
PROBE = Path("services/runtime/rollmesh/runtime/probe.py")
"""Dials the host and port of its own settings, and shows no token."""
OPENERS = {"insecure_channel", "secure_channel", "local_channel_credentials"}


def test_channels_are_opened_in_one_module() -> None:
    found = {
        path
        for root in ("services", "clients")
        for path in Path(root).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in OPENERS
    }
    assert found == {CHANNELS, PROBE}
