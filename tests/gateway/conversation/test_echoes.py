import pytest

from rollmesh.chat import Message, ToolCall
from rollmesh.gateway import Fidelity, Tree
from rollmesh.v1 import trajectory_pb2
from tests.gateway.worlds import END, World, said, user

CALL = ToolCall("call_1", "f", '{"a": 6,  "b":7.0, "note": "caf\\u00e9 "}')


@pytest.mark.parametrize(
    ("sampled", "echo", "reason"),
    [
        pytest.param(said(" A \n"), said(" A \n"), trajectory_pb2.FIDELITY_REASON_EXACT, id="same"),
        pytest.param(
            said(" A \n"), said("A"), trajectory_pb2.FIDELITY_REASON_LENIENT_ECHO, id="stripped"
        ),
        pytest.param(
            said("", CALL),
            said("", ToolCall("other", "f", '{"note":"caf\u00e9 ","a":6,"b":7.0}')),
            trajectory_pb2.FIDELITY_REASON_EXACT,
            id="arguments-re-serialised-and-ids-renamed",
        ),
        pytest.param(
            said("", ToolCall("call_1", "f", '{"a": 6, "b": ')),
            said("", ToolCall("call_1", "f", '{"a": 6}')),
            trajectory_pb2.FIDELITY_REASON_LENIENT_ECHO,
            id="broken-arguments-mended",
        ),
        pytest.param(
            said("", ToolCall("c", "f", "")),
            said("", ToolCall("c", "f", "{}")),
            trajectory_pb2.FIDELITY_REASON_EXACT,
            id="empty-arguments",
        ),
        pytest.param(
            Message("assistant", "A", (), "", "thought"),
            said("A"),
            trajectory_pb2.FIDELITY_REASON_EXACT,
            id="reasoning-dropped",
        ),
        pytest.param(
            said(" A"),
            Message("assistant", " A", name="worker"),
            trajectory_pb2.FIDELITY_REASON_LENIENT_ECHO,
            id="name-of-the-agent-added",
        ),
    ],
)
def test_an_echo_keeps_the_sampled_tokens(
    sampled: Message, echo: Message, reason: Fidelity
) -> None:
    world = World()
    world.turn((user("q"),), sampled)
    world.turn((user("q"), echo, user("more")), said("B"))
    (trajectory,) = world.export()
    assert trajectory.turns == 2
    assert trajectory.reasons == [reason]
    world.check()


THOUGHT = "I know.\n\nSix times seven."
THINKS = Message("assistant", "A\n\nB", reasoning=f"\n{THOUGHT}\n")
BESIDE = said("I look it up.", CALL)
TIDY = ToolCall("call_1", "f", '{"note":"caf\u00e9 ","a":6,"b":7.0}')


def folded(quoted: str, text: str) -> str:
    """Content with the reasoning inlined as open-webui does."""
    return (
        '<details type="reasoning" done="true" duration="12.5">\n'
        f"<summary>Thought for 12.5 seconds</summary>\n{quoted}\n</details>\n{text}"
    )


@pytest.mark.parametrize(
    ("sampled", "echo"),
    [
        pytest.param(BESIDE, said("", TIDY), id="text-beside-a-call-dropped"),
        pytest.param(
            BESIDE, Message("assistant", "", (TIDY,), name="crew"), id="text-dropped-name-added"
        ),
        pytest.param(
            said("Text.", CALL, ToolCall("call_2", "f", '{"a": ')),
            said(" ", TIDY, ToolCall("call_2", "f", "{}")),
            id="text-beside-two-calls-dropped-and-one-mended",
        ),
        pytest.param(said(" a \n\n\nb\t\nc "), said("a\nb\nc"), id="blank-lines-dropped"),
        pytest.param(said("a\nb"), said("a\r\nb\r\n"), id="other-ends-of-lines"),
        *(
            pytest.param(THINKS, said(echo), id=f"inlined-{at}")
            for at, echo in enumerate(
                [
                    f"<think>\n{THOUGHT}\n</think>\nA\n\nB",
                    f"<think>{THOUGHT}</think>A\n\nB",
                    f"{THOUGHT}\n</think>\n\nA\nB",
                    f"[THINK]{THOUGHT}[/THINK]A\n\nB",
                    f"<seed:think>{THOUGHT}</seed:think>A\n\nB",
                    f"<|START_THINKING|>{THOUGHT}<|END_THINKING|>A\n\nB",
                    f"<|channel>thought\n{THOUGHT}<channel|>A\n\nB",
                    f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final"
                    "<|message|>A\n\nB",
                    f"<reasoning>\r\n{THOUGHT} \n</reasoning>\nA\n\nB",
                    f"\u25c1think\u25b7{THOUGHT}\u25c1/think\u25b7A\n\nB",
                ]
            )
        ),
        *(
            pytest.param(THINKS, said(echo), id=f"folded-{at}")
            for at, echo in enumerate(
                [
                    folded("> I know.\n> \n> Six times seven.", "A\n\nB"),
                    folded("&gt; I know.\n&gt; \n&gt; Six times seven.", "\nA\n\nB"),
                    folded(THOUGHT, "A\n\nB"),
                    "<details>\n<summary>Thought</summary>\n\n>I know.\n>\n>Six times seven.\n"
                    "\n</details>A\n\nB",
                ]
            )
        ),
        pytest.param(
            Message("assistant", "A", reasoning='> "Is" 6 > 5 &amp; so on?\n\n  It\'s <so>.'),
            said(
                folded(
                    "&gt; &quot;Is&quot; 6 &gt; 5 &amp;amp; so on?\n&gt; \n"
                    "&gt;   It&#x27;s &lt;so&gt;.",
                    "A",
                )
            ),
            id="folded-and-escaped",
        ),
        pytest.param(
            Message("assistant", "A", reasoning='> "Is" 6 > 5 &amp; so on?\nIt\'s <so>.'),
            said(folded('> "Is" 6 > 5 &amp; so on?\n> It\'s <so>.', "A")),
            id="folded-and-not-escaped",
        ),
        pytest.param(
            said(folded("> I know.", "A"), ToolCall("call_1", "f", '{"a": ')),
            said(folded("> I know.", "A"), ToolCall("call_1", "f", "{}")),
            id="a-fold-of-the-models-own",
        ),
        pytest.param(
            Message("assistant", "Text.", (CALL,), reasoning=THOUGHT),
            said(folded("> I know.\n> \n> Six times seven.", ""), TIDY),
            id="folded-and-the-text-dropped",
        ),
        pytest.param(
            Message("assistant", "Text.", (CALL,), reasoning=THOUGHT),
            said(f"<think>\n{THOUGHT}\n</think>\nText.", TIDY),
            id="inlined-before-text-and-a-call",
        ),
        pytest.param(
            Message("assistant", "Text.", (CALL,), reasoning=THOUGHT),
            said(f"<think>\n{THOUGHT}\n</think>", TIDY),
            id="inlined-and-the-text-dropped",
        ),
        pytest.param(
            Message("assistant", "", (CALL,), reasoning=THOUGHT),
            said(f"<think>\n{THOUGHT}\n</think>\n", TIDY),
            id="inlined-before-a-call",
        ),
        pytest.param(
            Message("assistant", "A", reasoning=THOUGHT),
            Message("assistant", f"<think>{THOUGHT}</think>A", reasoning=THOUGHT),
            id="inlined-and-in-its-field",
        ),
    ],
)
def test_an_echo_with_dropped_or_inlined_parts_continues_the_sample(
    sampled: Message, echo: Message
) -> None:
    world = World()
    world.turn((user("q"),), said("A"))  # another sample
    world.turn((user("q"),), sampled)
    history = (user("q"), echo, user("more"))
    world.turn(history, said("B"))
    world.turn((*history, said("B"), user("on")), said("C"))
    main = world.export()[-1]
    assert main.turns == 3
    assert main.reasons == [trajectory_pb2.FIDELITY_REASON_LENIENT_ECHO]
    assert [one.lineage for one in world.export()] == [
        trajectory_pb2.LINEAGE_SIBLING,
        trajectory_pb2.LINEAGE_MAIN,
    ]
    world.check()


@pytest.mark.parametrize(
    ("sampled", "other"),
    [
        pytest.param(said("A"), said("B"), id="text"),
        pytest.param(said("", CALL), said("", ToolCall("call_1", "g", CALL.arguments)), id="name"),
        pytest.param(said("", CALL), said("", ToolCall("call_1", "f", '{"a": 7}')), id="arguments"),
        pytest.param(said("", CALL), said("", CALL, CALL), id="one-more-equal-call"),
        pytest.param(said("A"), Message("assistant", "A", (), "", "other thought"), id="reasoning"),
        pytest.param(
            Message("assistant", " A", reasoning="thought"),
            Message("assistant", "A", reasoning="other thought"),
            id="stripped-with-other-reasoning",
        ),
        pytest.param(BESIDE, said("", ToolCall("own", "f", CALL.arguments)), id="the-agents-id"),
        pytest.param(BESIDE, said("", ToolCall("", "f", CALL.arguments)), id="no-id"),
        pytest.param(BESIDE, said("", ToolCall("call_1", "g", CALL.arguments)), id="another-name"),
        pytest.param(BESIDE, said("", ToolCall("call_1", "f", '{"a": 7}')), id="other-arguments"),
        pytest.param(BESIDE, said("", TIDY, ToolCall("call_2", "f", "{}")), id="one-more-call"),
        pytest.param(BESIDE, said("Other text.", TIDY), id="another-text-beside-the-call"),
        pytest.param(
            said("A", ToolCall("", "f", "{}")),
            said("", ToolCall("", "f", "{}")),
            id="ids-of-nobody",
        ),
        pytest.param(THINKS, said("<think>Other.</think>A\n\nB"), id="another-thought-inlined"),
        pytest.param(
            THINKS, said(f"<think>{THOUGHT}</think>C"), id="another-text-behind-a-thought"
        ),
        pytest.param(THINKS, said(f"<think>{THOUGHT}</think>"), id="a-thought-without-its-text"),
        pytest.param(
            THINKS, said(f"Not true: {THOUGHT}</think>A\n\nB"), id="text-before-a-thought"
        ),
        pytest.param(THINKS, said(f"{THOUGHT}\nA\n\nB"), id="a-thought-without-marks"),
        pytest.param(
            THINKS,
            said(folded("> I know.\n> Six times nine.", "A\n\nB")),
            id="another-thought-folded",
        ),
        pytest.param(
            THINKS,
            said(folded("> I know.\n> Six times seven.", "C")),
            id="another-text-behind-a-folded-thought",
        ),
        pytest.param(
            THINKS,
            said(f"So: {folded('> I know.', 'A')}"),
            id="text-before-a-folded-thought",
        ),
        pytest.param(
            THINKS, said(f"<think>{THOUGHT}</think>But A\n\nB"), id="text-before-the-text"
        ),
        pytest.param(said("  a\n  b"), said("a\nb"), id="another-indentation"),
        pytest.param(said("a b"), said("ab"), id="no-blank-within-a-line"),
    ],
)
def test_a_rewritten_message_is_the_agents_own(sampled: Message, other: Message) -> None:
    world = World()
    world.turn((user("q"),), sampled)
    world.turn((user("q"), other, user("more")), said("B"))
    assert sorted(one.turns for one in world.export()) == [1, 1]
    world.check()


@pytest.mark.parametrize("bare_last", [True, False])
def test_ids_tell_a_call_with_dropped_text_from_a_call_without_text(*, bare_last: bool) -> None:
    world = World()
    bare = said("", ToolCall("bare", "f", "{}"))
    beside = said("Text.", ToolCall("beside", "f", "{}"))
    order = [beside, bare] if bare_last else [bare, beside]
    nodes = {one.tool_calls[0].id: world.turn((user("q"),), one) for one in order}
    for call_id, node in nodes.items():
        echo = said("", ToolCall(call_id, "f", "{}"))
        last = world.turn((user("q"), echo, Message("tool", "r", tool_call_id=call_id)), said("A"))
        assert node in last.path()
    world.check()


RENAMED = ToolCall("other", CALL.name, CALL.arguments)


@pytest.mark.parametrize("printed", [True, False], ids=["printed", "ignored"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param((said("", CALL),), (said("", RENAMED),), id="call"),
        pytest.param(
            (said("", CALL), Message("tool", "r", tool_call_id="call_1")),
            (said("", CALL), Message("tool", "r", tool_call_id="other")),
            id="result",
        ),
    ],
)
def test_ids_of_calls_count_only_where_the_template_prints_them(
    before: tuple[Message, ...], after: tuple[Message, ...], *, printed: bool
) -> None:
    world = World(Tree(frozenset({END}), call_ids=printed))
    world.turn((user("q"),), before[0])
    world.turn((user("q"), *before, user("more")), said("A"))
    node = world.turn((user("q"), *after, user("more"), said("A"), user("on")), said("B"))
    assert len(node.path()) == (5 if len(before) == 1 else 6) + 1
    assert (trajectory_pb2.FIDELITY_REASON_SHARED_PREFIX in world.export()[-1].reasons) == (
        printed and len(before) == 2
    )
    assert len(world.export()) == (2 if printed else 1)
    world.check()


def test_another_reasoning_of_the_agents_own_is_another_message() -> None:
    world = World()
    first = Message("assistant", "A", reasoning="one")
    for message in (first, Message("assistant", "A", reasoning="two")):
        world.turn((user("q"), message, user("x")), said("B"))
    assert len(world.export()) == 2
    world.check()


def attempt(call_id: str, arguments: str = '{"a": 6}') -> tuple[Message, Message]:
    """A call and its result."""
    call = said("", ToolCall(call_id, "f", arguments))
    return call, Message("tool", "r", tool_call_id=call_id)


@pytest.mark.parametrize("first_goes_on", [0, 1, 2])
@pytest.mark.parametrize("named_by", ["call and result", "call", "result"])
def test_the_ids_of_an_echo_say_which_of_equal_samples_goes_on(
    first_goes_on: int, named_by: str
) -> None:
    world = World()
    (one, result_one), (two, result_two) = attempt("one"), attempt("two")
    nodes = [world.turn((user("q"),), call) for call in (one, two)]
    history: tuple[Message, ...] = (user("q"), one, result_one)
    for at in range(first_goes_on):
        assert world.turn(history, said(f"A{at}")).path()[1] is nodes[0]
        history = (*history, said(f"A{at}"), user("on"))
    echo = two if "call" in named_by else said("", ToolCall("", "f", '{"a": 6}'))
    result = result_two if "result" in named_by else Message("tool", "r")
    last = world.turn((user("q"), echo, result), said("B"))
    assert last.path()[1] is nodes[1]
    again = world.turn((user("q"), echo, result, said("B"), user("more")), said("C"))
    assert last in again.path()
    world.check()


def test_an_echo_without_its_blanks_is_still_told_by_its_ids() -> None:
    world = World()
    first = world.turn((user("q"),), said(" now ", ToolCall("one", "f", "{}")))
    world.turn((user("q"),), said("now", ToolCall("two", "f", "{}")))
    echo = said("now", ToolCall("one", "f", "{}"))
    last = world.turn((user("q"), echo, Message("tool", "r", tool_call_id="one")), said("A"))
    assert first in last.path()
    world.check()


def test_ids_that_an_agent_made_up_part_nothing() -> None:
    world = World()
    (one, result_one), (other, result_other) = attempt("one"), attempt("other")
    world.turn((user("q"),), one)
    world.turn((user("q"),), attempt("two")[0])
    first = world.turn((user("q"), one, result_one), said("A"))
    last = world.turn((user("q"), other, result_other, said("A"), user("more")), said("B"))
    assert first in last.path()
    world.check()


def test_an_exact_echo_goes_before_a_mended_echo() -> None:
    world = World()
    echoed = world.turn((user("q"),), said(" now", ToolCall("", "f", "{}")))
    world.turn((user("q"),), said("now", ToolCall("", "f", '{"a": ')))
    last = world.turn(
        (user("q"), said("now", ToolCall("", "f", "{}")), Message("tool", "r")), said("A")
    )
    assert echoed in last.path()
    world.check()


def written(text: str = "", arguments: str = "{}") -> Message:
    """An answer with a call whose id the model wrote, as Kimi does: siblings have the same."""
    return said(text, ToolCall("functions.f:0", "f", arguments))


RESULT = Message("tool", "r", tool_call_id="functions.f:0")


@pytest.mark.parametrize(
    ("siblings", "echo", "continued"),
    [
        pytest.param([written("T1")], written(), 0, id="one-sample"),
        pytest.param([written("T1"), written("T2")], written(), None, id="two-texts"),
        pytest.param([written("T"), written("T")], written(), 1, id="equal-samples"),
        pytest.param([written("T"), written(" T\n")], written(), 1, id="equal-but-blanks"),
        pytest.param([written(), written("T2")], written(), 0, id="one-without-a-text"),
        pytest.param([written("T1"), written(" \n")], written(), 1, id="one-of-blanks"),
        pytest.param(
            [written("T1", '{"a": 1}'), written("T2", '{"a": 2}')],
            written("", '{"a":1}'),
            0,
            id="other-arguments",
        ),
        pytest.param(
            [written("T1", '{"a": 1}'), written("T2", '{"a": ')],
            written("", '{"a":1}'),
            0,
            id="whole-and-broken-arguments",
        ),
        pytest.param(
            [written("T1", '{"a": '), written("T2", '{"a": 1}')],
            written("T1", '{"a": 1}'),
            0,
            id="the-text-of-broken-arguments",
        ),
        pytest.param(
            [written("T", '{"a": '), written("T", '{"b": ')], written("T"), None, id="two-broken"
        ),
        pytest.param(
            [written("T", '{"a": '), written("U", '{"a": ')],
            written("T"),
            0,
            id="two-broken-of-which-one-has-the-text",
        ),
        pytest.param(
            [
                Message("assistant", text, written().tool_calls, reasoning=THOUGHT)
                for text in ("T1", "T2")
            ],
            written(f"<think>{THOUGHT}</think>"),
            None,
            id="two-texts-after-the-same-reasoning",
        ),
        pytest.param(
            [
                Message("assistant", text, written().tool_calls, reasoning=THOUGHT)
                for text in ("T1", "T2")
            ],
            written(f"<think>{THOUGHT}</think>T1"),
            0,
            id="inlined-reasoning-before-one-of-two-texts",
        ),
    ],
)
def test_an_echo_of_ids_that_the_model_wrote_continues_the_nearest_sample_or_none(
    siblings: list[Message], echo: Message, continued: int | None
) -> None:
    world = World()
    nodes = [world.turn((user("q"),), one) for one in siblings]
    last = world.turn((user("q"), echo, RESULT), said("A"))
    again = world.turn((user("q"), echo, RESULT, said("A"), user("more")), said("B"))
    assert [at for at, one in enumerate(nodes) if one in last.path()] == (
        [] if continued is None else [continued]
    )
    assert last in again.path()
    world.check()


@pytest.mark.parametrize("which", [0, 1])
def test_a_later_sample_tells_which_of_two_texts_an_echo_dropped(which: int) -> None:
    world = World()
    texts, answers = [written("T1"), written("T2")], [said("A1"), said("A2")]
    nodes = [world.turn((user("q"),), one) for one in texts]
    ends = [
        world.turn((user("q"), text, RESULT), answer)
        for text, answer in zip(texts, answers, strict=True)
    ]
    history = (user("q"), written(), RESULT, answers[which], user("more"))
    last = world.turn(history, said("B"))
    assert nodes[which] in last.path()
    assert ends[which] in last.path()
    assert last.reasons == {trajectory_pb2.FIDELITY_REASON_LENIENT_ECHO}
    world.check()


def test_a_later_sample_that_followed_both_texts_does_not_tell_which_it_was() -> None:
    world = World()
    texts, tail = [written("T1"), written("T2")], (RESULT, said("A"))
    for text in texts:
        world.turn((user("q"),), text)
    for text in texts:
        world.turn((user("q"), text, RESULT), said("A"))
    first = world.turn((user("q"), texts[0], *tail, user("next")), said("C"))
    last = world.turn((user("q"), written(), *tail, user("next"), said("C"), user("on")), said("D"))
    assert first in last.path()
    apart = world.turn((user("q"), written(), *tail, user("more")), said("B"))
    assert [one.messages for one in apart.path()[1:3]] == [(written(),), (RESULT,)]
    world.check()


def test_equal_samples_after_one_of_two_texts_tell_which_it_was() -> None:
    world = World()
    texts = [written("T1"), written("T2")]
    nodes = [world.turn((user("q"),), one) for one in texts]
    for _ in range(2):
        world.turn((user("q"), texts[0], RESULT), said("A"))
    last = world.turn((user("q"), written(), RESULT, said("A"), user("more")), said("B"))
    assert nodes[0] in last.path()
    world.check()


def test_a_nearer_sample_keeps_its_echo_where_a_farther_one_has_the_same_result() -> None:
    world = World()
    near, far = written(), written("T2")
    nodes = [world.turn((user("q"),), one) for one in (near, far)]
    for text in (near, far):
        world.turn((user("q"), text, RESULT), said("A"))
    last = world.turn((user("q"), near, RESULT, user("more")), said("B"))
    assert nodes[0] in last.path()
    results = [one for one in nodes[0].children if one.messages[0] == RESULT]
    assert len(results) == 1
    world.check()


def test_an_echo_of_different_samples_after_equal_ones_continues_neither() -> None:
    world = World()
    for call_id, text in (("one", "T1"), ("two", "T2")):
        parent = world.turn((user("q"),), attempt(call_id)[0])
        assert parent in world.turn((user("q"), *attempt(call_id)), written(text)).path()
    last = world.turn((user("q"), *attempt("own"), written(), RESULT), said("A"))
    calls = [one.messages[0].tool_calls for one in last.path() if one.sample]
    assert calls == [attempt("two")[0].tool_calls, ()]  # the newest of equal samples, no text
    assert (written(),) in [one.messages for one in last.path()]
    world.check()
