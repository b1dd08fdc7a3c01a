"""What an answer brings along: ids, log-probabilities, the most likely tokens. Many choices."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from rollmesh.chat import Tokenizer
from rollmesh.client import Session
from rollmesh.runtime.rpc import open_channel
from rollmesh.v1 import gateway_pb2, gateway_pb2_grpc, trajectory_pb2
from tests.meshes import Mesh

REPLY = "The answer is 42 ✓, naïve."
RULES = [("plain", REPLY), ("stop here", "one two three four")]
ASK: list[Any] = [{"role": "user", "content": "plain"}]
WANTED: dict[str, Any] = {
    "logprobs": True,
    "top_logprobs": 2,
    "extra_body": {"return_token_ids": True},
}


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def session(shared: Mesh) -> AsyncIterator[Session]:
    async with shared.client() as client, client.session() as session:
        yield session


async def ask(agent: Any, messages: list[Any] = ASK, **fields: Any) -> Any:
    return await agent.chat.completions.create(model="policy", messages=messages, **fields)


async def turns(mesh: Mesh, session: Session) -> list[gateway_pb2.SessionNode]:
    asked = gateway_pb2.GetSessionRequest(session_id=session.session_id)
    async with open_channel(mesh.processes["gateway"].address) as channel:
        tree = await gateway_pb2_grpc.GatewayServiceStub(channel).GetSession(asked)
    return [node for node in tree.nodes if node.sampled]


class Joined:
    """A stream put together again."""

    def __init__(self) -> None:
        self.text = ""
        self.prompts: list[list[int]] = []
        self.ids: list[int] = []
        self.logprobs: list[Any] = []

    def take(self, chunk: Any) -> None:
        if "prompt_token_ids" in (chunk.model_extra or {}):
            self.prompts.append(chunk.prompt_token_ids)
        for choice in chunk.choices:
            self.text += choice.delta.content or ""
            self.ids += (choice.model_extra or {}).get("token_ids") or []
            self.logprobs += choice.logprobs.content if choice.logprobs else []


async def streamed(agent: Any, messages: list[Any] = ASK, **fields: Any) -> Joined:
    joined = Joined()
    async for chunk in await ask(agent, messages, stream=True, **fields):
        joined.take(chunk)
    return joined


def check(tokenizer: Tokenizer, ids: list[int], logprobs: list[Any]) -> None:
    """The scripted engine's own log-probabilities, and text by which the answer can be spelt."""
    assert ids == tokenizer.encode(f"{REPLY}<|im_end|>").tolist()
    assert [one.logprob for one in logprobs] == pytest.approx([-(id_ % 97) / 50 for id_ in ids])
    assert b"".join(bytes(one.bytes) for one in logprobs).decode() == f"{REPLY}<|im_end|>"
    for id_, one in zip(ids, logprobs, strict=True):
        assert one.token == bytes(one.bytes).decode(errors="replace")
        first, second = one.top_logprobs
        assert (first.token, first.logprob) == (one.token, one.logprob)
        assert bytes(second.bytes) == tokenizer.token_bytes(
            (id_ + 1) % tokenizer.rust.get_vocab_size()
        )
        assert second.logprob == pytest.approx(one.logprob - 0.5)


async def test_a_whole_answer_brings_its_tokens(
    shared: Mesh, session: Session, tokenizer: Tokenizer
) -> None:
    answer = await ask(shared.openai(session), **WANTED)
    (choice,) = answer.choices
    assert choice.message.content == REPLY
    check(tokenizer, choice.token_ids, choice.logprobs.content)
    text = "<|im_start|>user\nplain<|im_end|>\n<|im_start|>assistant\n"
    assert answer.prompt_token_ids == tokenizer.encode(text).tolist()


async def test_a_stream_brings_each_token_once_and_the_prompt_first(
    shared: Mesh, session: Session, tokenizer: Tokenizer
) -> None:
    agent = shared.openai(session)
    joined = await streamed(agent, **WANTED)
    assert joined.text == REPLY
    check(tokenizer, joined.ids, joined.logprobs)
    assert joined.prompts == [(await ask(agent, **WANTED)).prompt_token_ids]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_retry_brings_the_same_also_from_another_gateway_process(
    shared: Mesh, session: Session, tokenizer: Tokenizer, *, stream: bool
) -> None:
    agent = shared.openai(session, max_retries=5)
    wanted: dict[str, Any] = {**WANTED, "extra_headers": {"idempotency-key": "one"}}
    first = await ask(agent, **wanted)
    await shared.restart("gateway")
    if stream:
        again = await streamed(agent, **wanted)
        assert again.text == REPLY
        check(tokenizer, again.ids, again.logprobs)
        assert again.prompts == [first.prompt_token_ids]
        return
    whole = await ask(agent, **wanted)
    assert (whole.id, whole.choices) == (first.id, first.choices)
    assert whole.prompt_token_ids == first.prompt_token_ids


async def test_a_key_is_not_given_again_for_other_returns(shared: Mesh, session: Session) -> None:
    agent = shared.openai(session)
    key: dict[str, Any] = {"extra_headers": {"idempotency-key": "one"}}
    await ask(agent, **key)
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(agent, **WANTED, **key)
    assert refused.value.code == "idempotency_key_reused"


async def test_fields_that_were_not_requested_are_not_sent(shared: Mesh, session: Session) -> None:
    answer = await ask(shared.openai(session))
    assert answer.choices[0].logprobs is None
    assert "token_ids" not in answer.choices[0].model_extra
    assert "prompt_token_ids" not in answer.model_extra


async def test_tokens_may_be_named_by_their_ids(
    shared: Mesh, session: Session, tokenizer: Tokenizer
) -> None:
    body = {"return_tokens_as_token_ids": True}
    answer = await ask(shared.openai(session), logprobs=True, extra_body=body)
    ids = tokenizer.encode(f"{REPLY}<|im_end|>").tolist()
    entries = answer.choices[0].logprobs.content
    assert [entry.token for entry in entries] == [f"token_id:{id_}" for id_ in ids]
    assert [entry.top_logprobs for entry in entries] == [[]] * len(ids)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_tokens_behind_a_stop_string_are_not_brought(
    shared: Mesh, session: Session, tokenizer: Tokenizer, *, stream: bool
) -> None:
    agent = shared.openai(session)
    messages = [{"role": "user", "content": "stop here"}]
    for kept, text in ((False, "one "), (True, "one two")):
        wanted = {
            "stop": ["two"],
            "logprobs": True,
            "extra_body": {"return_token_ids": True, "include_stop_str_in_output": kept},
        }
        if stream:
            joined = await streamed(agent, messages, **wanted)
            found, ids, logprobs = joined.text, joined.ids, joined.logprobs
        else:
            (choice,) = (await ask(agent, messages, **wanted)).choices
            found, ids, logprobs = choice.message.content, choice.token_ids, choice.logprobs.content
        assert found == text
        spelt = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert spelt.startswith("one two")
        assert ids == tokenizer.encode("one two three four").tolist()[: len(ids)]
        assert "three" not in spelt
        assert len(logprobs) == len(ids)


async def test_special_tokens_and_stop_tokens_are_shown_as_asked(
    shared: Mesh, session: Session, tokenizer: Tokenizer
) -> None:
    agent = shared.openai(session)
    messages = [{"role": "user", "content": "stop here"}]
    ids = tokenizer.encode("one two three four").tolist()
    at = next(at for at, id_ in enumerate(ids) if at and id_ not in ids[:at])
    until = b"".join(map(tokenizer.token_bytes, ids[: at + 1]))
    stopped = {"stop_token_ids": [ids[at]]}
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, "one two three four"),
        ({"ignore_eos": True, "skip_special_tokens": False}, "one two three four<|im_end|>"),
        ({"skip_special_tokens": False}, "one two three four"),
        (stopped, until.removesuffix(tokenizer.token_bytes(ids[at])).decode()),
        (stopped | {"include_stop_str_in_output": True}, until.decode()),
    ]
    for body, text in cases:
        answer = await ask(agent, messages, extra_body=body)
        assert answer.choices[0].message.content == text, body


async def test_a_request_for_many_choices_is_one_call(shared: Mesh, session: Session) -> None:
    agent = shared.openai(session)
    answer = await ask(agent, n=40, seed=2**63 - 2, **WANTED)
    assert [choice.index for choice in answer.choices] == list(range(40))
    assert {choice.message.content for choice in answer.choices} == {REPLY}
    sampled = await turns(shared, session)
    assert len(sampled) == 40
    assert len({node.parent_node_id for node in sampled}) == 1


async def test_more_choices_than_the_gateway_gives_are_refused(
    shared: Mesh, session: Session
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(shared.openai(session), n=129)
    assert refused.value.param == "n"
    assert "give 1 to 128" in refused.value.message


async def test_every_choice_of_a_stream_is_whole(
    shared: Mesh, session: Session, tokenizer: Tokenizer
) -> None:
    found = [Joined() for _ in range(5)]
    prompts: list[list[int]] = []
    async for chunk in await ask(shared.openai(session), n=5, stream=True, **WANTED):
        if "prompt_token_ids" in chunk.model_extra:
            prompts.append(chunk.prompt_token_ids)
        for choice in chunk.choices:
            found[choice.index].take(chunk)
    assert len(prompts) == 1
    for joined in found:
        assert joined.text == REPLY
        check(tokenizer, joined.ids, joined.logprobs)


@pytest.mark.parametrize(
    "mask",
    [{"allowed_token_ids": [5]}, {"logit_bias": {"5": 1}}, {"bad_words": ["no"]}],
    ids=["allowed", "bias", "words"],
)
async def test_a_turn_of_another_distribution_says_so(
    shared: Mesh, session: Session, mask: dict[str, Any]
) -> None:
    await ask(shared.openai(session), extra_body=mask)
    (turn,) = await turns(shared, session)
    assert set(turn.reasons) == {
        trajectory_pb2.FIDELITY_REASON_CONSTRAINED,
        trajectory_pb2.FIDELITY_REASON_SAMPLING_CHANGED,
    }


async def test_a_refusal_of_the_engine_uses_the_requests_own_names(
    shared: Mesh, session: Session
) -> None:
    agent = shared.openai(session)
    for body, name in (
        ({"allowed_token_ids": [99_999]}, "allowed_token_ids"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"bad_words": ["a" * 300]}, "bad_words"),
        ({"bad_words": [" "]}, "bad_words[0]"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(agent, extra_body=body)
        assert refused.value.param == name
