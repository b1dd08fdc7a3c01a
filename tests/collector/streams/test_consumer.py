from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollmesh.collector import Consumer, Page, Stream, Unit
from rollmesh.v1 import collector_pb2 as pb

TRAINER = pb.Consumer(name="trainer", unit=pb.DELIVERY_UNIT_SESSION, lease_ms=100)


class DeliveryMachine(RuleBasedStateMachine):
    """Any order of arrivals, credits, acknowledgements, losses, against plain sets."""

    def __init__(self) -> None:
        super().__init__()
        self.consumer = Consumer(TRAINER)
        self.now = 0
        self.units: dict[str, Unit] = {}
        self.done: set[str] = set()
        self.holds: dict[Stream, set[str]] = {}
        self.credits: dict[Stream, int] = {}
        self.late: dict[str, Stream] = {}

    @rule()
    def unit_arrives(self) -> None:
        number = len(self.units) + 1
        unit = Unit(number, f"s{number}", (f"s{number}",))
        self.units[unit.unit_id] = unit
        self.consumer.add(unit)

    @rule()
    def stream_opens(self) -> None:
        stream = self.consumer.open_stream()
        self.holds[stream], self.credits[stream] = set(), 0

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), count=st.integers(1, 3))
    def grant(self, data: st.DataObject, count: int) -> None:
        stream = data.draw(st.sampled_from(list(self.holds)))
        stream.credits += count
        self.credits[stream] += count

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(list(self.holds)))
        held = set().union(*self.holds.values())
        free = [u for id_, u in self.units.items() if id_ not in held | self.done]
        if any(count for other, count in self.credits.items() if other != stream):
            free = [u for u in free if self.late.get(u.unit_id) != stream]
        unit = self.consumer.take(stream, self.now)
        if not self.credits[stream] or not free:
            assert unit is None
            return
        assert unit is not None
        assert unit == min(free)  # the oldest first
        self.credits[stream] -= 1
        self.holds[stream].add(unit.unit_id)

    @precondition(lambda self: self.units)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        unit_id = data.draw(st.sampled_from(sorted(self.units)))
        self.consumer.settle(unit_id)
        self.done.add(unit_id)
        for held in self.holds.values():
            held.discard(unit_id)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def stream_ends(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(list(self.holds)))
        self.consumer.close_stream(stream)
        del self.holds[stream], self.credits[stream]
        self.late = {id_: late for id_, late in self.late.items() if late != stream}

    @rule()
    def leases_run_out(self) -> None:
        self.now += 101
        expired = self.consumer.expire(self.now)
        assert expired == any(self.holds.values())
        for stream, held in self.holds.items():
            self.late.update(dict.fromkeys(held, stream))
            held.clear()

    @rule(data=st.data())
    def a_unit_arrives_again(self, data: st.DataObject) -> None:
        open_ = [unit for id_, unit in self.units.items() if id_ not in self.done]
        if open_:
            self.consumer.add(data.draw(st.sampled_from(open_)))

    @invariant()
    def every_unit_is_in_one_place(self) -> None:
        held = sum(map(len, self.holds.values()))
        assert len(self.consumer.leased) == held, repr(self.consumer)
        assert len(self.consumer.ready) == len(self.units) - len(self.done) - held


TestDeliveryMachine = DeliveryMachine.TestCase
TestDeliveryMachine.settings = settings(stateful_step_count=40)


def test_a_unit_goes_to_the_stream_that_did_not_let_its_lease_run_out() -> None:
    consumer = Consumer(TRAINER)
    slow, fast = consumer.open_stream(), consumer.open_stream()
    unit = Unit(1, "s", ("s",))
    consumer.add(unit)
    slow.credits += 3
    assert consumer.take(slow, 0) == unit
    assert consumer.expire(100)
    fast.credits += 1
    assert consumer.take(slow, 100) is None
    assert consumer.take(fast, 100) == unit
    consumer.expire(200)
    assert consumer.take(slow, 200) == unit  # nobody else has credits


def test_nothing_waits_for_a_stream_whose_consumer_does_not_read() -> None:
    consumer = Consumer(TRAINER)
    slow, fast = consumer.open_stream(), consumer.open_stream()
    for stream in (slow, fast):
        stream.credits += 3
    consumer.add(unit(1))
    consumer.add(unit(2))
    assert consumer.take(slow, 0) == unit(1)
    with slow.sending(50):
        assert consumer.take(fast, 50) == unit(2)
        assert consumer.expire(100)
        assert consumer.take(fast, 100) == unit(1)
        assert not consumer.expire(149)
        assert consumer.expire(150)  # of `fast`. `slow`, which has credits, has stalled by now
        assert consumer.take(fast, 150) == unit(2)
        assert not consumer.stalled
        consumer.close_stream(fast)
        assert consumer.stalled
    assert not consumer.stalled
    assert consumer.take(slow, 250) == unit(1)


def unit(seq: int) -> Unit:
    return Unit(seq, f"s{seq}", (f"s{seq}",))


def test_many_credits_do_not_bring_in_the_whole_store() -> None:
    consumer = Consumer(TRAINER)
    consumer.open_stream().credits = 60_000
    for begin in range(0, 1000, 64):
        wanted = consumer.wanted()
        units = [unit(seq) for seq in range(begin, begin + wanted)]
        consumer.add_page(Page(units, cursor=begin, more=True))
        assert len(consumer.ready) < 2 * 64


def test_as_much_is_fetched_as_the_streams_may_take() -> None:
    consumer = Consumer(TRAINER)
    assert consumer.wanted() == 0  # nobody has credits
    first = consumer.open_stream()
    first.credits = 3
    consumer.open_stream().credits = 2
    assert consumer.wanted() == 5
    consumer.more = False
    assert consumer.wanted() == 0
    consumer.add_page(Page([unit(1), unit(2)], cursor=2, more=True))
    assert (len(consumer.ready), consumer.cursor, consumer.wanted()) == (2, 2, 3)
    first.credits += 60_000
    assert consumer.wanted() == 64  # a page, not the whole store


def test_a_unit_settled_while_its_page_is_read_is_not_delivered() -> None:
    consumer = Consumer(TRAINER)
    stream = consumer.open_stream()
    stream.credits = 5
    assert consumer.wanted() == 5
    consumer.settle("s1")
    consumer.add_page(Page([unit(1), unit(2)], cursor=2, more=False))
    assert consumer.take(stream, 0) == unit(2)
    assert consumer.take(stream, 0) is None


def test_a_settled_unit_that_the_store_returns_again_is_delivered_again() -> None:
    consumer = Consumer(TRAINER)
    stream = consumer.open_stream()
    stream.credits += 5
    for _ in range(2):
        consumer.add_page(Page([unit(1), unit(2)], cursor=2, more=False))
        assert len(consumer.ready) == 2
        assert consumer.take(stream, 0) == unit(1)
        for seq in (1, 2):  # one is leased, the other is ready
            consumer.settle(f"s{seq}")
        consumer.wanted()  # a new page is fetched


def test_a_consumer_that_is_reset_begins_anew_with_its_streams() -> None:
    consumer = Consumer(TRAINER)
    stream = consumer.open_stream()
    stream.credits += 2
    consumer.add_page(Page([unit(1), unit(2)], cursor=2, more=False))
    assert consumer.take(stream, 0) == unit(1)
    consumer.reset()
    assert not consumer.ready
    assert not consumer.leased
    assert (consumer.cursor, consumer.more) == (0, True)
    assert consumer.wanted() == 1  # the credit that is left
    stream.credits += 1
    assert consumer.wanted() == 2
