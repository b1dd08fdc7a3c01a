"""Determines the lineage of each branch of a session's tree, by rules over the complete tree.

The *main* conversation is chosen first, at close, when all conversations are known. Each rule
keeps the conversations that satisfy it, if any do. The first rule that leaves exactly one decides:

| the main conversation |
|---|
| has a turn: a context with which the session started has none until one continues it |
| has a turn whose request says MAIN |
| does not begin with a turn whose request says another lineage |
| has tools, other than one for a title |
| continues: a second turn follows the first |
| is not a probe, and does not quote the first user message of another one of the 64 oldest, as
title calls do |
| is the oldest |

Where the main conversation forks, its children are compared in the same way: has a turn, says MAIN,
does not begin with another lineage, answers the calls of the previous turn, continues, is the
oldest. So a title or memory call is not mistaken for the main work because it came first. Branches
that leave the main conversation, and other conversations, are classified by these rules. The first
match decides:

| rule | lineage |
|---|---|
| an edge that the agent declared labels it | the edge's, see `LineageEdge` |
| its request says a lineage other than MAIN | that lineage |
| it is the main path of the main conversation | MAIN |
| it leaves the main path with another sample of a turn | SIBLING |
| it leaves the main path with another message, after a sampled turn | BRANCH |
| one turn of one token, cut by its request's limit: a probe | AUXILIARY |
| without tools, which the main one has, after all of the main path: a final answer. Under another
system message only if the main path does not end with an answer | MAIN |
| one turn without tools, with another system message, while the main one has tools | AUXILIARY |
| one turn whose only tool takes a title, by its name or its only parameter, with another system
message | AUXILIARY |
| main's tools and system message, after main's last turn, which is not its first, with a shorter
history that holds a recent answer, or a user message that quotes one | COMPACTION |
| another system message, or other tools | SUB_AGENT |
| anything else | BRANCH if messages other than the system message are shared, else ROOT |

An uncertain case is never AUXILIARY, because AUXILIARY turns are not trained.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple, TypeAlias

from rollmesh.chat import MessageGroup, lenient_key
from rollmesh.chat.parsing import tool_schemas
from rollmesh.gateway.tree import Lineage, Node, Tree
from rollmesh.v1 import sampling_pb2, trajectory_pb2

LEAST_CHARS = 8
"""Length of the shortest text whose quotation counts."""
_STARTS_COMPARED, _START_CHARS = 64, 16_384
"""Number of conversations whose first messages are compared, and the compared beginning of each."""
_TURNS_BEFORE_COMPACTION = 2
_RECENT_TURNS = 8
_LONGEST_HISTORY = 64  # messages before the first turn of a compaction that are looked at
_QUOTED_PARTS = 3  # of an answer: its longest
_QUOTED_CHARS = 32  # of an answer that does not say that it is a summary
_READ_CHARS = 65_536
_MAIN_OR_NONE = frozenset({None, trajectory_pb2.LINEAGE_MAIN})
_TAG = re.compile(r"</?[\w-]{1,32}>")


Source: TypeAlias = trajectory_pb2.LineageSource.ValueType
_DECLARED = trajectory_pb2.LINEAGE_SOURCE_DECLARED
_HEADER = trajectory_pb2.LINEAGE_SOURCE_HEADER
_RULE = trajectory_pb2.LINEAGE_SOURCE_RULE
_Rule: TypeAlias = trajectory_pb2.LineageRule.ValueType
_MAIN_PATH = trajectory_pb2.LINEAGE_RULE_MAIN_PATH
_NO_RULE = trajectory_pb2.LINEAGE_RULE_UNSPECIFIED
RULES: Mapping[_Rule, Lineage] = {
    _MAIN_PATH: trajectory_pb2.LINEAGE_MAIN,
    trajectory_pb2.LINEAGE_RULE_FINAL_ANSWER: trajectory_pb2.LINEAGE_MAIN,
    trajectory_pb2.LINEAGE_RULE_OTHER_SAMPLE: trajectory_pb2.LINEAGE_SIBLING,
    trajectory_pb2.LINEAGE_RULE_OTHER_MESSAGE: trajectory_pb2.LINEAGE_BRANCH,
    trajectory_pb2.LINEAGE_RULE_SHARED_MESSAGES: trajectory_pb2.LINEAGE_BRANCH,
    trajectory_pb2.LINEAGE_RULE_OWN_ROOT: trajectory_pb2.LINEAGE_ROOT,
    trajectory_pb2.LINEAGE_RULE_PROBE: trajectory_pb2.LINEAGE_AUXILIARY,
    trajectory_pb2.LINEAGE_RULE_WITHOUT_TOOLS: trajectory_pb2.LINEAGE_AUXILIARY,
    trajectory_pb2.LINEAGE_RULE_TITLE_TOOL: trajectory_pb2.LINEAGE_AUXILIARY,
    trajectory_pb2.LINEAGE_RULE_OTHER_SYSTEM: trajectory_pb2.LINEAGE_SUB_AGENT,
    trajectory_pb2.LINEAGE_RULE_OTHER_TOOLS: trajectory_pb2.LINEAGE_SUB_AGENT,
    trajectory_pb2.LINEAGE_RULE_RECENT_ANSWER: trajectory_pb2.LINEAGE_COMPACTION,
    trajectory_pb2.LINEAGE_RULE_QUOTED_ANSWER: trajectory_pb2.LINEAGE_COMPACTION,
}
"""The lineage that each rule gives."""


class Label(NamedTuple):
    """The lineage of a branch."""

    lineage: Lineage
    source: Source
    """Who says so."""
    rule: _Rule = _NO_RULE
    """The rule, if one says so."""
    is_rejected: bool = False
    """Whether it belongs to a compaction that the agent attempted and did not take."""


def lineages(tree: Tree, nodes: Iterable[Node]) -> dict[int, Label]:
    """Returns the labels of the branches that end in `nodes`, by node id."""
    if not tree.edges and len([*tree.leaves()]) < 2:
        # A single path, of which only requests say more.
        found: dict[int, Label] = {}
        label = Label(trajectory_pb2.LINEAGE_MAIN, _RULE, _MAIN_PATH)
        for node in tree.nodes.values():
            label = label if node.said is None else Label(node.said, _HEADER)
            found[node.node_id] = label
        return found
    ways = _Ways(tree)
    return {node.node_id: ways.label(node.node_id) for node in nodes}


# Labels by edges and by requests.


class _Saying(NamedTuple):
    """The label of a turn and of the turns that follow it, by a declared edge or its request."""

    at: int
    """Id of the turn."""
    source: Source
    lineage: Lineage | None
    """None if the lineage of another turn decides."""
    like: int = 0
    """Id of that turn."""
    compacts: bool = False
    """Whether it is a compaction, unless the other turn is a sub-agent's."""


_KINDS = (
    *("subagent_call", "subagent_cancel", "subagent_return"),
    *("compaction", "compaction_attempt"),
    "continuation",
)
"""The kinds of edges that say something. The first one in this order counts."""


def turns_by_request(tree: Tree) -> dict[str, list[Node]]:
    """Returns the turns that answered the requests that have ids."""
    turns: dict[str, list[Node]] = {}
    for node in tree.nodes.values():
        for request_id in node.sample.request_ids if node.sample else ():
            turns.setdefault(request_id, []).append(node)
    return turns


def _sayings(tree: Tree) -> dict[int, _Saying]:
    """Returns the labels of turns, by node id. An edge counts more than the request itself."""
    said: dict[int, _Saying] = {}
    turns = turns_by_request(tree) if tree.edges else {}
    known = (edge for edge in tree.edges if edge.kind in _KINDS)
    for edge in sorted(known, key=lambda one: _KINDS.index(one.kind)):
        returns = edge.kind == "subagent_return"
        source = turns.get(edge.source)
        for node in turns.get(edge.source if returns else edge.target, ()):
            if edge.kind.startswith("subagent"):
                saying = _Saying(node.node_id, _DECLARED, trajectory_pb2.LINEAGE_SUB_AGENT)
            elif source:
                compacts = edge.kind != "continuation"
                like = source[0].node_id
                saying = _Saying(node.node_id, _DECLARED, None, like, compacts=compacts)
            elif edge.kind == "continuation":
                continue
            else:
                saying = _Saying(node.node_id, _DECLARED, trajectory_pb2.LINEAGE_COMPACTION)
            said.setdefault(node.node_id, saying)
    for node in tree.nodes.values():
        if node.said is not None and node.node_id not in said:
            said[node.node_id] = _Saying(node.node_id, _HEADER, node.said)
    return said


def _rejected(tree: Tree) -> set[str]:
    """Returns the requests that attempted compactions that the agent did not take."""
    attempts = {edge.target for edge in tree.edges if edge.kind == "compaction_attempt"}
    feeders: dict[str, list[str]] = {}
    taken: list[str] = []
    for edge in tree.edges:
        if edge.kind == "compaction" or (
            edge.kind == "continuation" and edge.target not in attempts
        ):
            taken.append(edge.source)
        elif edge.kind == "continuation":
            feeders.setdefault(edge.target, []).append(edge.source)
    while taken:
        request_id = taken.pop()
        if request_id in attempts:
            attempts.remove(request_id)
            taken += feeders.get(request_id, ())
    return attempts


class _Way(NamedTuple):
    """The properties of a path that decide its lineage."""

    start: Node
    """Its first node."""
    said: _Saying | None = None
    """The last label of a turn on it."""
    rejected: bool = False
    """Whether that is a rejected compaction."""
    first: Node | None = None
    """Its first node off the main path, or None if it stays on the main path."""
    last: Node | None = None
    """The last node at which it departs from the preferred continuation of its conversation."""
    shared: bool = False
    """Whether it has a turn on the main path."""
    begun: Node | None = None
    """Its first turn that is not on the main path."""
    depth: int = 0
    """Number of its message groups that are no system message."""
    along: int = 0
    """Number of these, from the first, that are equal to the main path."""
    parted: Node | None = None
    """The first of them that does not."""


class _Ways:
    """The main path of a tree and the paths that leave it."""

    def __init__(self, tree: Tree) -> None:
        """Counts the turns below each node. Parents precede their children in `nodes`."""
        self._said = _sayings(tree)
        self._turns: dict[int, int] = {}
        self._first: dict[int, Node | None] = {}
        """The first turn at or below each node, following the oldest child."""
        self._says_main: set[int] = set()
        for node in reversed(tree.nodes.values()):
            below = max((self._turns[child.node_id] for child in node.children), default=0)
            self._turns[node.node_id] = below + (node.sample is not None)
            oldest = self._first[node.children[0].node_id] if node.children else None
            self._first[node.node_id] = node if node.sample is not None else oldest
            says = any(child.node_id in self._says_main for child in node.children)
            said = self._said.get(node.node_id)
            if says or (said is not None and said.lineage == trajectory_pb2.LINEAGE_MAIN):
                self._says_main.add(node.node_id)
        starts = [node for node in tree.nodes.values() if _is_start(node)]
        self._chosen: dict[int, Node] = {}
        self._main = self._main_of(starts) if starts else None
        self._known: dict[tuple[int, int, bool], _Rule] = {}
        self._begun: dict[int, _Way] = {}
        """The paths that end with a first turn beside the main path, by its id."""
        self._trunk: list[Node] = []
        reached = self._main
        while reached is not None:
            self._trunk.append(reached)
            reached = self._next(reached) if reached.children else None
        self._worked = [node.node_id for node in self._trunk if node.was_sampled]
        """Ids of the main path's turns, with those of the context that the session starts from."""
        self._told = [node for node in self._trunk if node.messages[0].role != "system"]
        self._last = max((at for at, one in enumerate(self._told) if one.was_sampled), default=0)
        """Index of the last turn in `_told`."""
        self._sampled = sorted(one.node_id for one in tree.nodes.values() if one.was_sampled)
        self._nodes = tree.nodes
        self._parts: dict[int, list[str]] = {}
        self._carries: dict[int, bool] = {}
        self._labels: dict[int, Label] = {}
        """The labels by declared edges, by the id of the turn."""
        self._found = self._all_of(tree)

    def label(self, node_id: int) -> Label:
        """Returns the label of the branch that ends in a node.

        Edges refer to other turns, which may refer to others. In a circle nobody says anything.
        """
        way = self._found[node_id]
        chain: dict[int, _Saying] = {}
        at, said = way, way.said
        while said is not None and said.like and not (said.at in self._labels or said.at in chain):
            chain[said.at] = said
            at = self._found[said.like]
            said = at.said
        known = None if said is None else self._labels.get(said.at)
        if said is not None and said.at in chain:
            at = at._replace(said=None)
        label = known or self._own(at)
        for turn, saying in reversed(chain.items()):
            lineage = label.lineage
            if saying.compacts and lineage != trajectory_pb2.LINEAGE_SUB_AGENT:
                lineage = trajectory_pb2.LINEAGE_COMPACTION
            label = self._labels[turn] = Label(lineage, _DECLARED)
        return label._replace(is_rejected=way.rejected)

    def _own(self, way: _Way) -> Label:
        """Returns the label of a branch of which no edge refers to another turn."""
        if way.said is not None and way.said.lineage not in {None, trajectory_pb2.LINEAGE_MAIN}:
            return Label(way.said.lineage or trajectory_pb2.LINEAGE_MAIN, way.said.source)
        main = self._main
        assert main is not None
        if way.first is None or way.last is None:
            rule = _MAIN_PATH
        elif way.start is main and (way.shared or way.first.sample is not None):
            rule = trajectory_pb2.LINEAGE_RULE_OTHER_SAMPLE
            if way.last.sample is None:
                rule = trajectory_pb2.LINEAGE_RULE_OTHER_MESSAGE
        else:
            begun = 0 if way.begun is None else way.begun.node_id
            key = way.start.node_id, begun, bool(way.along)
            if key not in self._known:
                self._known[key] = self._beside(way, way.begun, main)
            rule = self._known[key]
        lineage = RULES[rule]
        if way.said is not None and way.said.lineage == lineage:
            return Label(lineage, _HEADER)
        return Label(lineage, _RULE, rule)

    def _all_of(self, tree: Tree) -> dict[int, _Way]:
        """Returns the paths of all nodes, by the id of the last node."""
        found: dict[int, _Way] = {}
        attempts = _rejected(tree)
        for node in tree.nodes.values():
            assert node.parent is not None
            before = found.get(node.parent.node_id) or _Way(node)
            start, said, rejected, first, last, shared, begun, depth, along, parted = before
            if (own := self._said.get(node.node_id)) is not None:
                asked = node.sample.request_ids if node.sample else ()
                said, rejected = own, not attempts.isdisjoint(asked)
            preferred = self._main if _is_start(node) else self._next(node.parent)
            if node is not preferred:
                first, last = first or node, node
            if node.sample is not None and first is None:
                shared = True
            elif node.sample is not None:
                begun = begun or node
            if node.messages[0].role != "system":
                told = self._told[along] if not parted and along < len(self._told) else None
                if told and (node is told or _is_echo(node.messages, told.messages)):
                    along += 1
                else:
                    parted = parted or node
                depth += 1
            found[node.node_id] = _Way(
                start, said, rejected, first, last, shared, begun, depth, along, parted
            )
            if begun is node:
                self._begun[node.node_id] = found[node.node_id]
        return found

    def _main_of(self, starts: list[Node]) -> Node:
        def rank(start: Node) -> tuple[int, ...]:
            continues = self._turns[start.node_id] > 1
            has_tools = bool(start.render_context.tools_json) and not _is_titled(start)
            has_turns = self._turns[start.node_id] > 0
            sayings = self._says(start)
            return (has_turns, *sayings, self._continued(start) == 0, has_tools, continues)

        best = max(map(rank, starts))
        ranked = [start for start in starts if rank(start) == best]
        if len(ranked) == 1:
            return ranked[0]
        asked = [_first_asked(start)[:_START_CHARS] for start in starts[:_STARTS_COMPARED]]

        def is_work(start: Node) -> bool:
            first, text = self._first[start.node_id], _first_asked(start)[:_START_CHARS]
            quotes = any(len(text) > len(one) >= LEAST_CHARS and one in text for one in asked)
            return not quotes and not (first is not None and _is_probe(first))

        return next(filter(is_work, ranked[:_STARTS_COMPARED]), ranked[0])

    def _next(self, node: Node) -> Node:
        """Returns the child with which a path preferably continues."""
        if len(node.children) == 1:
            return node.children[0]
        chosen = self._chosen.get(id(node))
        if chosen is None:

            def rank(child: Node) -> tuple[int, ...]:
                answers = child.messages[0].role == "tool"
                continues = self._turns[child.node_id] > 1
                has_turns = self._turns[child.node_id] > 0
                return (has_turns, *self._says(child), self._continued(child), answers, continues)

            chosen = self._chosen[id(node)] = max(node.children, key=rank)
        return chosen

    def _says(self, node: Node) -> tuple[bool, bool]:
        """Returns whether a turn below is said to be MAIN, and the first to be nothing else."""
        said = self._said_first(node)
        other = said is not None and (said.compacts or said.lineage not in _MAIN_OR_NONE)
        return node.node_id in self._says_main, not other

    def _continued(self, node: Node) -> int:
        """Returns 1 if the first turn from a node on is declared to continue one above the node.

        -1 if it continues a turn elsewhere, and 0 if no edge says that it continues one.
        """
        said = self._said_first(node)
        if said is None or not said.like or said.compacts:
            return 0
        return 1 if any(one.node_id == said.like for one in node.up()) else -1

    def _said_first(self, node: Node) -> _Saying | None:
        """Returns the label of the first turn at or below a node."""
        first = self._first[node.node_id]
        return None if first is None else self._said.get(first.node_id)

    def _beside(self, way: _Way, first: Node | None, main: Node) -> _Rule:
        """Returns the rule for a conversation that shares no sampled turn with the main one."""
        start = way.start
        one_turn = first is not None and self._turns[first.node_id] == 1
        same_system = _system(start) == _system(main)
        same_context = start.render_context.key == main.render_context.key
        if one_turn and first is not None and _is_probe(first):
            return trajectory_pb2.LINEAGE_RULE_PROBE
        toolless = bool(main.render_context.tools_json) and not start.render_context.tools_json
        if toolless and first is not None and self._continues(first):
            last = self._nodes[self._worked[-1]]
            is_answered = (  # the main path ends with an answer: whole and without calls
                last.sample is not None
                and last.sample.finish == sampling_pb2.FINISH_REASON_STOP
                and not last.messages[0].tool_calls
                and trajectory_pb2.FIDELITY_REASON_MALFORMED_TOOL_CALL not in last.reasons
            )
            if same_system or not is_answered:
                return trajectory_pb2.LINEAGE_RULE_FINAL_ANSWER
        if one_turn and not same_system and toolless:
            return trajectory_pb2.LINEAGE_RULE_WITHOUT_TOOLS
        if one_turn and not same_system and _is_titled(start):
            return trajectory_pb2.LINEAGE_RULE_TITLE_TOOL
        if same_context and same_system and first is not None and (rule := self._compacts(first)):
            return rule
        if not same_system:
            return trajectory_pb2.LINEAGE_RULE_OTHER_SYSTEM
        if not same_context and start.render_context.tools_json:
            return trajectory_pb2.LINEAGE_RULE_OTHER_TOOLS
        if start is main and way.along:
            return trajectory_pb2.LINEAGE_RULE_SHARED_MESSAGES
        return trajectory_pb2.LINEAGE_RULE_OWN_ROOT

    def _continues(self, first: Node) -> bool:
        """Returns whether a turn's history is the main path, with an echo of its last answer."""
        way, last = self._begun[first.node_id], self._last
        if not self._worked or self._worked[-1] > first.node_id or way.depth - 1 <= last:
            return False
        parted = way.parted is not None and way.parted.messages[0].role == "assistant"
        return way.along > last or (way.along == last and parted)

    def _compacts(self, first: Node) -> _Rule:
        """Returns by which rule a turn carries the work on from a shorter history, or none."""
        # It comes after the last of the main path's two or more turns.
        follows = len(self._worked) >= _TURNS_BEFORE_COMPACTION and self._worked[-1] < first.node_id
        if not follows or self._begun[first.node_id].depth - 1 >= self._last:
            return _NO_RULE
        assert first.parent is not None
        answered = False
        for node in islice(first.parent.up(), _LONGEST_HISTORY):
            role = node.messages[0].role
            if role == "user" or (role == "assistant" and not answered):
                if node.node_id not in self._carries:
                    self._carries[node.node_id] = self._carries_recent(node)
                if self._carries[node.node_id] and role == "user":
                    return trajectory_pb2.LINEAGE_RULE_QUOTED_ANSWER
                if self._carries[node.node_id]:
                    return trajectory_pb2.LINEAGE_RULE_RECENT_ANSWER
            answered = answered or role == "assistant"
        return _NO_RULE

    def _carries_recent(self, node: Node) -> bool:
        """Returns whether a message echoes a recent answer, or quotes one if it is the user's."""
        after = bisect_left(self._sampled, node.node_id)
        recent = {*self._sampled[max(0, after - _RECENT_TURNS) : after], self._worked[-1]}
        if node.messages[0].role == "assistant":
            return any(_is_echo(node.messages, self._nodes[one].messages) for one in recent)
        text = _even(node.messages[0].content)
        return any(part in text for one in recent for part in self._quotable(self._nodes[one]))

    def _quotable(self, turn: Node) -> list[str]:
        """Returns the longest parts of an answer, between tags, that another message may quote."""
        found = self._parts.get(turn.node_id)
        if found is None:
            said = self._said.get(turn.node_id)
            is_summary = said is not None and (
                said.compacts or said.lineage == trajectory_pb2.LINEAGE_COMPACTION
            )
            least = LEAST_CHARS if is_summary else _QUOTED_CHARS
            parts = [_even(part) for part in _TAG.split(turn.messages[0].content[:_READ_CHARS])]
            longest = sorted(parts, key=len, reverse=True)[:_QUOTED_PARTS]
            found = self._parts[turn.node_id] = [part for part in longest if len(part) >= least]
        return found


def _is_probe(node: Node) -> bool:
    sample = node.sample
    return (
        sample is not None
        and sample.completion_tokens == 1  # a server elsewhere gives no ids, and maybe no number
        and sample.finish == sampling_pb2.FINISH_REASON_LENGTH
        and trajectory_pb2.FIDELITY_REASON_BUDGET not in node.reasons
    )


def _is_titled(start: Node) -> bool:
    """Returns whether the only tool of a conversation takes a title, as title calls have it."""
    tools = start.render_context.tools_json
    schemas = tool_schemas(tools) if tools else {}
    if len(schemas) != 1:
        return False
    ((name, schema),) = schemas.items()
    properties = schema.get("properties")
    return "title" in name.lower() or (isinstance(properties, dict) and [*properties] == ["title"])


def _is_start(node: Node) -> bool:
    return node.parent is not None and node.parent.parent is None


def _first_asked(start: Node) -> str:
    """Returns the first user message of a conversation."""
    node: Node | None = start
    while node is not None and node.messages[0].role == "system":
        node = node.children[0] if node.children else None
    return node.messages[0].content if node is not None else ""


def _is_echo(messages: MessageGroup, others: MessageGroup) -> bool:
    """Returns whether two groups say the same, blank text and ids of calls aside."""
    return (
        messages[0].role == others[0].role
        and len(messages) == len(others)
        and (lenient_key(messages, call_ids=False) == lenient_key(others, call_ids=False))
    )


def _even(text: str) -> str:
    """Returns the beginning of a text with single spaces."""
    return " ".join(text[:_READ_CHARS].split())


def _system(start: Node) -> MessageGroup:
    return start.messages if start.messages[0].role == "system" else ()
