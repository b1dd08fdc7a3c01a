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
        self.sent: set[str] = set()
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
        unit = self.consumer.take(stream)
        if not self.credits[stream] or not free:
            assert unit is None
            return
        assert unit is not None
        assert unit == min(free)  # the oldest first
        self.credits[stream] -= 1
        self.holds[stream].add(unit.unit_id)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(list(self.holds)))
        unit_id = data.draw(st.sampled_from(["unknown", *self.units]))
        is_held = unit_id in self.holds[stream]
        assert self.consumer.send(unit_id, stream, self.now) == is_held
        if is_held:
            self.sent.add(unit_id)

    @precondition(lambda self: self.units)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        unit_id = data.draw(st.sampled_from(sorted(self.units)))
        self.consumer.settle(unit_id)
        self.done.add(unit_id)
        self._left(unit_id)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def stream_ends(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(list(self.holds)))
        self.consumer.close_stream(stream)
        self._left(*self.holds.pop(stream))
        del self.credits[stream]
        self.late = {id_: late for id_, late in self.late.items() if late != stream}

    @rule()
    def leases_run_out(self) -> None:
        self.now += 101
        expired = self.consumer.expire(self.now)
        assert expired == bool(self.sent)
        for stream, held in self.holds.items():
            self.late.update(dict.fromkeys(held & self.sent, stream))
        self._left(*self.sent)

    def _left(self, *unit_ids: str) -> None:
        self.sent.difference_update(unit_ids)
        for held in self.holds.values():
            held.difference_update(unit_ids)

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
    consumer.add(unit(1))
    slow.credits += 3
    assert sends(consumer, slow, 0) == unit(1)
    assert consumer.expire(100)
    fast.credits += 1
    assert consumer.take(slow) is None
    assert sends(consumer, fast, 100) == unit(1)
    consumer.expire(200)
    assert consumer.take(slow) == unit(1)  # nobody else has credits


def test_a_lease_begins_when_the_unit_is_sent_however_long_it_was_loaded() -> None:
    consumer = Consumer(TRAINER)
    stream, other = consumer.open_stream(), consumer.open_stream()
    stream.credits = other.credits = 1
    consumer.add(unit(1))
    assert consumer.take(stream) == unit(1)
    assert not consumer.expire(1_000)
    assert consumer.take(other) is None
    assert consumer.send("s1", stream, 1_000)
    assert not consumer.expire(1_099)
    assert consumer.expire(1_100)
    assert not consumer.send("s1", stream, 1_100)
    assert consumer.take(other) == unit(1)


def test_nothing_waits_for_a_stream_whose_consumer_does_not_read() -> None:
    consumer = Consumer(TRAINER)
    slow, fast = consumer.open_stream(), consumer.open_stream()
    for stream in (slow, fast):
        stream.credits += 3
    consumer.add(unit(1))
    consumer.add(unit(2))
    consumer.add(unit(3))
    assert sends(consumer, slow, 0) == unit(1)
    assert consumer.take(slow) == unit(2)
    with slow.sending(50):
        assert sends(consumer, fast, 50) == unit(3)
        assert consumer.expire(100)
        assert sends(consumer, fast, 100) == unit(1)
        assert not consumer.expire(149)
        assert consumer.expire(150)  # `slow`, which has credits and an unsent unit, has stalled
        assert consumer.take(fast) == unit(2)
        assert not consumer.stalled
        consumer.close_stream(fast)
        assert consumer.stalled
    assert not consumer.stalled
    assert consumer.take(slow) == unit(1)


def sends(consumer: Consumer, stream: Stream, now_ms: int) -> Unit | None:
    """Takes a unit for a stream and sends it at once."""
    if found := consumer.take(stream):
        assert consumer.send(found.unit_id, stream, now_ms)
    return found


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
    assert consumer.take(stream) == unit(2)
    assert consumer.take(stream) is None


def test_a_settled_unit_that_the_store_returns_again_is_delivered_again() -> None:
    consumer = Consumer(TRAINER)
    stream = consumer.open_stream()
    stream.credits += 5
    for _ in range(2):
        consumer.add_page(Page([unit(1), unit(2)], cursor=2, more=False))
        assert len(consumer.ready) == 2
        assert consumer.take(stream) == unit(1)
        for seq in (1, 2):  # one is leased, the other is ready
            consumer.settle(f"s{seq}")
        consumer.wanted()  # a new page is fetched


def test_a_consumer_that_is_reset_begins_anew_with_its_streams() -> None:
    consumer = Consumer(TRAINER)
    stream = consumer.open_stream()
    stream.credits += 2
    consumer.add_page(Page([unit(1), unit(2)], cursor=2, more=False))
    assert consumer.take(stream) == unit(1)
    consumer.reset()
    assert not consumer.ready
    assert not consumer.leased
    assert (consumer.cursor, consumer.more) == (0, True)
    assert consumer.wanted() == 1  # the credit that is left
    stream.credits += 1
    assert consumer.wanted() == 2
