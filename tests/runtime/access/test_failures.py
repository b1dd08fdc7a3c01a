from rollmesh.runtime.access import Failures, address_of


def test_refusals_of_one_address_take_longer_and_longer() -> None:
    failures = Failures()
    delays = [failures.failed("ipv4:10.0.0.1", 0)[1] for _ in range(30)]
    assert delays[:16] == [0] * 16
    assert delays[16:20] == [10, 20, 40, 80]
    assert delays[-1] == 2_000
    assert failures.failed("ipv4:10.0.0.2", 0) == (1, 0)


def test_they_are_forgiven_with_time() -> None:
    failures = Failures()
    for _ in range(64):
        failures.failed("a", 0)
    assert failures.failed("a", 10_000)[0] == 33
    assert failures.failed("a", 200_000) == (1, 0)


def test_the_number_of_remembered_addresses_is_bounded() -> None:
    failures = Failures(most=3)
    for name in "abcdcc":
        failures.failed(name, 0)
    assert failures.failed("a", 0)[0] == 1
    assert failures.failed("c", 0)[0] == 4


def test_an_address_has_no_port() -> None:
    assert address_of("ipv4:10.0.0.1:4711") == address_of("ipv4:10.0.0.1:4712") == "ipv4:10.0.0.1"
    assert address_of("ipv6:%5B::1%5D:4711") == "ipv6:%5B::1%5D"
    assert address_of("unix:") == "unix"
