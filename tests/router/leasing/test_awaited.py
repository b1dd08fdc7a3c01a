from rollmesh.router.leasing.awaited import AwaitedEngines


def test_a_bounded_number_of_engines_is_awaited() -> None:
    awaited = AwaitedEngines(awaited_ms=100, most=2)
    first = awaited.awaiting("a", 0)
    assert first is not None
    assert awaited.awaiting("b", 10) is not None
    assert awaited.awaiting("c", 20) is None
    assert awaited.awaiting("a", 30) is first
    for engine_id in awaited.overdue(100):
        awaited.pop(engine_id)
    assert awaited.awaiting("c", 100) is not None
