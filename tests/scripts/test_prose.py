"""The ratchet of the prose counts constructions and fails above a ceiling."""

import pytest

from scripts import prose


@pytest.mark.parametrize(
    ("construction", "text", "count"),
    [
        ("relative", "what a client sends to who asks", 2),
        ("relative", "the request of a caller; what?", 0),
        ("pronoun", "those that wait, and that of which nothing is known", 2),
        ("semicolon", "first; second; third", 2),
    ],
)
def test_a_construction_is_counted(construction: str, text: str, count: int) -> None:
    assert len(prose.CONSTRUCTIONS[construction].findall(text)) == count


def test_a_ceiling_that_is_exceeded_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prose.main([]) == 0
    monkeypatch.setitem(prose.CEILINGS, "protos", {"pronoun": 0.0})
    assert prose.main([]) == 1
    assert "ABOVE" in capsys.readouterr().out
