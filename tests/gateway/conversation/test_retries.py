"""Which sample a request gets: retries share one, siblings never do."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from rollmesh.gateway import EqualTurns, Turn


class Sample(Turn):
    """A sample: in flight, or answered."""

    def __init__(self, waiting: int = 0, *, sent: bool = False, tries: int = 0) -> None:
        super().__init__("a", "f", "", 0, sent=sent, tries=tries)
        self.readers = {asyncio.Event() for _ in range(waiting)}
        self.is_answered = False


@dataclass(eq=False)
class Request:
    """A request that waits for its answer."""

    retry_count: int
    sample: Sample
    reader: asyncio.Event = field(default_factory=asyncio.Event)


def equal(samples: list[Sample]) -> EqualTurns:
    turns = EqualTurns()
    for sample in samples:
        turns.add(sample)
    return turns


@pytest.mark.parametrize(
    ("samples", "retry_count", "joined"),
    [
        pytest.param([], 0, None, id="first"),
        pytest.param([], 1, None, id="retry of what never came"),
        pytest.param([Sample(waiting=1)], 0, None, id="sibling at the same time"),
        pytest.param([Sample(waiting=1)], 1, 0, id="retry of one in flight"),
        pytest.param([Sample(sent=True)], 0, None, id="sibling afterwards"),
        pytest.param([Sample(sent=True)], 1, 0, id="retry of one that was sent"),
        pytest.param([Sample(sent=True), Sample(sent=True)], 1, 1, id="the newest that was sent"),
        pytest.param([Sample()], 0, 0, id="a turn without waiters"),
        pytest.param([Sample(waiting=1), Sample()], 0, 1, id="which may be a later one"),
        pytest.param([Sample(sent=True), Sample(waiting=1)], 1, 1, id="awaited before sent"),
        pytest.param([Sample(waiting=1), Sample(waiting=1)], 1, 0, id="the oldest in flight"),
        pytest.param(
            [Sample(waiting=1, tries=1), Sample(waiting=1)], 1, 1, id="siblings time out together"
        ),
        pytest.param(
            [Sample(sent=True), Sample(waiting=1, tries=1)], 1, 0, id="or were answered together"
        ),
        pytest.param(
            [Sample(waiting=1, tries=1), Sample(waiting=1, tries=2)], 2, 0, id="and once more"
        ),
    ],
)
def test_a_request_joins(samples: list[Sample], retry_count: int, joined: int | None) -> None:
    found = equal(samples).retried(retry_count)
    assert found is (None if joined is None else samples[joined])


class Requests(RuleBasedStateMachine):
    """Equal requests of any number, their retries, and a gateway that restarts."""

    waiting: Bundle[Request] = Bundle("waiting")

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Sample] = []
        self.turns = equal([])
        self.given: list[Request] = []

    @rule(target=waiting, retry_count=st.sampled_from([0, 0, 0, 1, 2]))
    def asks(self, retry_count: int) -> Request:
        lost = [one for one in self.samples if not one.readers and not one.sent]
        sample = self.turns.retried(retry_count)
        if retry_count:
            assert (sample is None) == (not self.samples)  # a retry is not a sample
        else:
            assert (sample is None) == (not lost)  # and a sample is not a retry
            assert sample is None or sample in lost
        if lost:
            assert sample in lost  # unread answers are returned before read ones
        if sample is None:
            sample = Sample()
            self.samples.append(sample)
            self.turns.add(sample)
        assert isinstance(sample, Sample)
        request = Request(retry_count, sample)
        sample.readers.add(request.reader)
        sample.tries = max(sample.tries, retry_count)
        self.given.append(request)
        return request

    @rule(request=waiting)
    def gets_its_answer(self, request: Request) -> None:
        if request in self.given:
            request.sample.is_answered = request.sample.sent = True
            self.leave(request)

    @rule(request=waiting)
    def leaves_when_the_answer_is_committed(self, request: Request) -> None:
        if request in self.given:
            request.sample.is_answered = True
            self.leave(request)

    @rule(request=waiting)
    def leaves_in_the_middle(self, request: Request) -> None:
        if request not in self.given:
            return
        self.leave(request)
        if not request.sample.readers and not request.sample.is_answered:
            self.samples.remove(request.sample)
            self.turns.remove(request.sample)  # aborted, so it cannot be joined

    @rule(recorded=st.booleans())
    def the_gateway_restarts(self, *, recorded: bool) -> None:
        self.given.clear()
        answered = [one for one in self.samples if one.is_answered]
        self.samples = [Sample(sent=one.sent and recorded, tries=one.tries) for one in answered]
        for one in self.samples:
            one.is_answered = True
        self.turns = equal(self.samples)

    def leave(self, request: Request) -> None:
        self.given.remove(request)
        request.sample.readers.remove(request.reader)

    @invariant()
    def no_answer_goes_to_two_that_are_no_retries(self) -> None:
        for sample in self.samples:
            given = [one for one in self.given if one.sample is sample]
            assert sum(not request.retry_count for request in given) <= 1


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=100, stateful_step_count=30)
