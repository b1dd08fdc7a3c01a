"""Conversation trees for tests, and what an engine would have seen of them."""

import random
from dataclasses import dataclass, field

import numpy as np

from rollmesh.chat import Message, RenderContext, ToolCall, group_messages, make_context
from rollmesh.gateway import (
    RULES,
    Finish,
    Lineage,
    Match,
    Node,
    Sample,
    Tree,
    blobs_of,
    export_tree,
    serialize,
)
from rollmesh.runtime.codec import Mask, unpack_tokens
from rollmesh.v1 import chat_pb2, collector_pb2, sampling_pb2, session_pb2, trajectory_pb2

END = 1
BARE = make_context(b"", b"")
TOOLS = make_context(b'[{"type": "function", "function": {"name": "f"}}]', b"")


@dataclass
class World:
    """A tree, and what an engine would have seen of it."""

    tree: Tree = field(default_factory=lambda: Tree(frozenset({END})))
    seen: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    """By sampled node: the prompt the engine got, and what it sampled."""
    next_id: int = 100
    asked: list[tuple[Message, ...]] = field(default_factory=list)
    """The messages of all requests so far."""
    bookmarked: int = 0
    """How often a search began where an earlier request led."""

    def ids(self, count: int) -> np.ndarray:
        """Ids that occur nowhere else: any confusion of nodes shows."""
        self.next_id += count
        return np.arange(self.next_id - count, self.next_id, dtype=np.uint32)

    def turn(
        self,
        messages: tuple[Message, ...],
        reply: Message,
        *,
        context: RenderContext = BARE,
        finish: Finish = sampling_pb2.FINISH_REASON_STOP,
        version: int = 0,
        tokens: int = 3,
        said: Lineage | None = None,
    ) -> Node:
        groups = group_messages(messages)
        match = self.match(messages, context)
        parent = match.node
        closing = [] if parent.ends_turn else [END]
        for group in groups[match.depth :]:
            ids = np.array([*closing, *self.ids(2).tolist(), END], np.uint32)
            parent, closing = self.tree.add_messages(parent, group, ids), []
        opening = np.array([*closing, *self.ids(1).tolist()], np.uint32)
        sampled = self.ids(tokens)
        if finish == sampling_pb2.FINISH_REASON_STOP:
            sampled = np.append(sampled, np.uint32(END)).astype(np.uint32)
        prompt = np.concatenate([*(one.token_ids for one in parent.path()), opening])
        sample = Sample(
            sampled,
            np.full(len(sampled), -0.5, np.float32),
            (
                sampling_pb2.VersionSpan(
                    policy_version=version, end=len(sampled), engine_id="engine-0"
                ),
            ),
            finish,
            len(prompt),
            0,
            0,
        )
        node = self.tree.add_sample(parent, reply, opening, sample, match.reasons, said=said)
        self.seen[node.node_id] = (prompt.tolist(), sampled.tolist())
        return node

    def match(self, messages: tuple[Message, ...], context: RenderContext) -> Match:
        """Where a request meets the tree: the same from the root and from any earlier request."""
        groups, tree = group_messages(messages), self.tree
        found, bookmark = tree.search(tree.start(context, groups), groups)
        for earlier in self.asked:
            if messages[: len(earlier)] == earlier:
                start = tree.start(context, groups, repr(earlier).encode())
                self.bookmarked += start.match.depth > 0
                other, _ = tree.search(start, groups)
                assert other == found or not found.depth
        tree.keep(context, repr(messages).encode(), bookmark)
        self.asked.append(messages)
        return found

    def export(self) -> list[trajectory_pb2.Trajectory]:
        record = session_pb2.SessionRecord()
        for _ in export_tree(self.tree, "s", record.trajectories.add):
            pass
        sent = collector_pb2.IngestRequest.FromString(serialize(record, blobs_of(self.tree)))
        return list(sent.sessions[0].trajectories)

    def check(self) -> None:
        """What must hold of any export."""
        trained: dict[int, int] = {}
        for trajectory in self.export():
            packed, logprobs, _ = unpack_tokens(trajectory.tokens, "tokens")
            ids = packed.tolist()
            assert trajectory.session_id == "s"
            if trajectory.lineage_source == trajectory_pb2.LINEAGE_SOURCE_RULE:
                assert RULES[trajectory.lineage_rule] == trajectory.lineage
            else:
                assert not trajectory.lineage_rule
            assert len(ids) == len(logprobs) == len(mask_of(trajectory))
            assert [s.start for s in trajectory.segments] == [
                0,
                *(s.end for s in trajectory.segments),
            ][:-1]
            for segment in trajectory.segments:
                mask = mask_of(trajectory)[segment.start : segment.end]
                assert bool(mask.all()) == segment.trained == bool(mask.any())
                if segment.sampled:
                    assert segment.role == chat_pb2.ROLE_ASSISTANT
                    prompt, sampled = self.seen[segment.node_id]
                    assert ids[: segment.start] == prompt  # what the engine saw
                    assert ids[segment.start : segment.end] == sampled  # what it sampled
                    trained[segment.node_id] = trained.get(segment.node_id, 0) + segment.trained
                    assert (
                        segment.trained
                        or trajectory_pb2.FIDELITY_REASON_SHARED_PREFIX in segment.reasons
                    )
                else:
                    assert not segment.trained
        assert trained == dict.fromkeys(self.seen, 1)


def mask_of(trajectory: trajectory_pb2.Trajectory) -> Mask:
    return unpack_tokens(trajectory.tokens, "tokens")[2]


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, calls)


def random_world(seed: int, turns: int) -> World:
    """Branches, siblings, edits, other tools, cuts and echoes, by chance."""
    dice, world = random.Random(seed), World()
    histories: list[tuple[Message, ...]] = [()]
    for _ in range(turns):
        history = dice.choice(histories)
        kind = dice.randrange(4)
        ask = (user(dice.choice("xyz")),) if kind or not history else ()
        if history and dice.random() < 0.2:
            ask = (Message("tool", "r"), Message("tool", dice.choice("rs")), *ask)
        request = (*history, *ask)
        reply = said(dice.choice(["A", "B", " A ", ""]))
        world.turn(
            request,
            reply,
            context=dice.choice([BARE, BARE, TOOLS]),
            finish=dice.choice(
                [sampling_pb2.FINISH_REASON_STOP, sampling_pb2.FINISH_REASON_LENGTH]
            ),
            version=dice.randrange(3),
        )
        echo = reply if dice.random() < 0.7 else said(reply.content.strip())
        histories.append((*request, echo))
    return world
