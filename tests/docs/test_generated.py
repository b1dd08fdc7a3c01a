"""Pages that are generated are current. `make docs-generate` makes them again."""

from pathlib import Path

import pytest

from rollmesh.runtime.config import describe
from rollmesh.runtime.errors import RollmeshError
from rollmesh.v1.errors_pb2 import ErrorReason
from scripts.curve import CURVE, TABLE, draw, measured
from scripts.pages import alarms, configuration, conformance, errors, peers, security
from tests.chat.parsing import page as parsers
from tests.paths import ROOT

AGAIN = "run `make docs-generate`"


def test_the_page_of_errors_is_current() -> None:
    assert (ROOT / "docs" / "errors.md").read_text("utf-8") == errors.page(), AGAIN


def test_the_page_of_checks_is_current() -> None:
    found = (ROOT / "docs" / "conformance.md").read_text("utf-8")
    assert found == conformance.page(), AGAIN


def test_the_page_of_peers_is_current() -> None:
    assert (ROOT / "docs" / "peers.md").read_text("utf-8") == peers.page(), AGAIN


def test_the_table_of_roles_is_current() -> None:
    text = security.PAGE.read_text("utf-8")
    assert text == security.page(text), AGAIN


def test_the_page_of_alarms_is_current() -> None:
    text = alarms.PAGE.read_text("utf-8")
    assert text == alarms.page(text), AGAIN
    assert alarms.PROMETHEUS.read_text("utf-8") == alarms.prometheus(), AGAIN
    assert alarms.BOARD.read_text("utf-8") == alarms.board(), AGAIN


def test_the_columns_of_the_record_are_current() -> None:
    pytest.importorskip("pyarrow")
    from scripts.pages import record

    text = record.PAGE.read_text("utf-8")
    assert text == record.page(text), AGAIN


def test_the_page_of_settings_is_current() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text("utf-8") == configuration.page(), AGAIN


def test_every_setting_has_a_description() -> None:
    for service, config in configuration.CONFIGS.items():
        for setting in describe(config, service):
            assert setting.doc, setting.variable
            named = f"rollmesh_{service}_{setting.name}".upper()
            assert setting.variable == named  # as the page says


def test_the_page_of_parsers_is_current() -> None:
    assert (ROOT / "docs" / "parsers.md").read_text("utf-8") == parsers.document(), AGAIN


def test_every_reason_of_the_contract_has_a_meaning_and_a_remedy() -> None:
    found = errors.contract(errors.PROTO.read_text("utf-8"))
    assert found.keys() == {name.removeprefix("ERROR_REASON_") for name in ErrorReason.keys()[1:]}
    assert all(len(paragraphs) == 2 and all(paragraphs) for paragraphs in found.values())


def test_a_reason_is_that_of_one_error() -> None:
    found: dict[str, type[RollmeshError]] = {}
    for one in errors.subclasses(RollmeshError):
        assert found.setdefault(one.reason, one) is one


def test_the_curve_shows_the_measured_points(tmp_path: Path) -> None:
    rows = measured(TABLE.read_text("utf-8"))
    assert len(rows) == 30
    draw(rows, tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").read_text() == CURVE.read_text(), AGAIN


def test_a_line_of_the_table_that_is_no_step_is_not_drawn() -> None:
    rows = measured(
        "| step | seed 0 | seed 1 | seed 2 |\n|---:|---:|---:|---:|\n| 1 | 0.2 | 0.3 | 0.4 |\n"
    )
    assert rows == [(1.0, 0.2, 0.3, 0.4)]
