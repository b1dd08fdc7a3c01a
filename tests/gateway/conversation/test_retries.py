"""Which sample a request gets: retries share one, siblings never do."""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from rollmesh.chat.parsing.events import TextEvent
from rollmesh.gateway.conversation.retries import retried
from rollmesh.gateway.conversation.session import Begun, Reading, Turn


@dataclass(eq=False)
class Sampled:
    """A sample: in flight, or answered."""

    waiting: int = 0
    sent: bool = False
    tries: int = 0
    answered: bool = False
    given: list["Request"] = field(default_factory=list)


@dataclass(eq=False)
class Request:
    """A request that waits for its answer."""

    retry_count: int
    sample: Sampled


@pytest.mark.parametrize(
    ("samples", "retry_count", "joined"),
    [
        pytest.param([], 0, None, id="first"),
        pytest.param([], 1, None, id="retry of what never came"),
        pytest.param([Sampled(waiting=1)], 0, None, id="sibling at the same time"),
        pytest.param([Sampled(waiting=1)], 1, 0, id="retry of one in flight"),
        pytest.param([Sampled(sent=True)], 0, None, id="sibling afterwards"),
        pytest.param([Sampled(sent=True)], 1, 0, id="retry of one that was sent"),
        pytest.param([Sampled(sent=True), Sampled(sent=True)], 1, 1, id="the newest that was sent"),
        pytest.param([Sampled()], 0, 0, id="one that nobody waits for"),
        pytest.param([Sampled(waiting=1), Sampled()], 0, 1, id="which may be a later one"),
        pytest.param([Sampled(sent=True), Sampled(waiting=1)], 1, 1, id="awaited before sent"),
        pytest.param([Sampled(waiting=1), Sampled(waiting=1)], 1, 0, id="the oldest in flight"),
        pytest.param(
            [Sampled(waiting=1, tries=1), Sampled(waiting=1)], 1, 1, id="siblings time out together"
        ),
        pytest.param(
            [Sampled(sent=True), Sampled(waiting=1, tries=1)], 1, 0, id="or were answered together"
        ),
        pytest.param(
            [Sampled(waiting=1, tries=1), Sampled(waiting=1, tries=2)], 2, 0, id="and once more"
        ),
    ],
)
def test_a_request_joins(samples: list[Sampled], retry_count: int, joined: int | None) -> None:
    found = retried(samples, retry_count)
    assert found is (None if joined is None else samples[joined])


class Requests(RuleBasedStateMachine):
    """Equal requests of any number, their retries, and a gateway that restarts."""

    waiting: Bundle[Request] = Bundle("waiting")

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Sampled] = []

    @rule(target=waiting, retry_count=st.sampled_from([0, 0, 0, 1, 2]))
    def asks(self, retry_count: int) -> Request:
        lost = [one for one in self.samples if not one.waiting and not one.sent]
        sample = retried(self.samples, retry_count)
        if retry_count:
            assert (sample is None) == (not self.samples)  # a retry is not a sample
        else:
            assert (sample is None) == (not lost)  # and a sample is not a retry
            assert sample is None or sample in lost
        if lost:
            assert sample in lost  # unread answers are returned before read ones
        if sample is None:
            sample = Sampled()
            self.samples.append(sample)
        request = Request(retry_count, sample)
        sample.waiting += 1
        sample.tries = max(sample.tries, retry_count)
        sample.given.append(request)
        return request

    @rule(request=waiting)
    def gets_its_answer(self, request: Request) -> None:
        if request in request.sample.given:
            request.sample.answered = request.sample.sent = True
            self.leave(request)

    @rule(request=waiting)
    def goes_away_when_the_answer_is_committed(self, request: Request) -> None:
        if request in request.sample.given:
            request.sample.answered = True
            self.leave(request)

    @rule(request=waiting)
    def goes_away_in_the_middle(self, request: Request) -> None:
        if request not in request.sample.given:
            return
        self.leave(request)
        if not request.sample.waiting and not request.sample.answered:
            self.samples.remove(request.sample)  # aborted, so it cannot be joined

    @rule(recorded=st.booleans())
    def the_gateway_restarts(self, *, recorded: bool) -> None:
        for one in self.samples:
            one.given.clear()
        self.samples = [
            Sampled(sent=one.sent and recorded, tries=one.tries, answered=True)
            for one in self.samples
            if one.answered
        ]

    def leave(self, request: Request) -> None:
        request.sample.given.remove(request)
        request.sample.waiting -= 1

    @invariant()
    def no_answer_goes_to_two_that_are_no_retries(self) -> None:
        for sample in self.samples:
            assert sum(not request.retry_count for request in sample.given) <= 1


TestRequests = Requests.TestCase
TestRequests.settings = settings(max_examples=100, stateful_step_count=30)


async def test_events_of_an_answer_that_was_lost_do_not_reach_who_joins_later() -> None:
    turn = Turn(1, "a", "f")
    turn.emit([TextEvent("lost")])  # without a stream the turn restarts on another engine
    assert not turn.has_emitted
    turn.begin_again()
    turn.stream = True
    turn.emit([TextEvent("kept")])
    assert turn.has_emitted
    turn.prompt_tokens = 7
    events = turn.events()
    assert [await anext(events) for _ in range(3)] == [Begun("a"), Reading(7), TextEvent("kept")]
