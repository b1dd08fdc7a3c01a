from rollmesh.collector import Retention

"""When settled sessions are removed."""


def test_near_full_settled_units_go_at_once() -> None:
    retention = Retention(settled_ms=1000, max_bytes=100)
    assert retention.settled_before(90, 5000) == 4000
    assert retention.settled_before(91, 5000) == 5000
