"""The words of the viewer, `tail`, `top`, `doctor` and `inspect` for sessions.

Each reason, each label of a branch and each cause of an untrained token is a sentence.
"""

from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from rollmesh.runtime.codec.enums import name_of, plain
from rollmesh.runtime.runs import told
from rollmesh.v1 import gateway_pb2, session_pb2, trajectory_pb2

REASONS = {
    "EXACT": "The engine received and sampled these ids, and nothing was excluded.",
    "LENIENT_ECHO": "The agent repeated a sampled message with small differences, such as other "
    "whitespace. The sampled tokens were kept.",
    "TEMPLATE_REWRITE": "The chat template prints the conversation differently now, so the turn's "
    "prompt differs from its render.",
    "TOOLS_CHANGED": "The agent changed its tools or template options, which began a new root.",
    "LENGTH_CUT": "A length limit ended the turn. The tokens that close it are not trained.",
    "MIGRATED": "The engine was lost or interrupted, and the answer was continued from its tokens.",
    "MIXED_VERSIONS": "More than one policy version sampled the tokens.",
    "RETRY_REPLAY": "The agent asked again and got the same answer. It was sampled once.",
    "MALFORMED_TOOL_CALL": "A tool call could not be parsed. The agent got it as text.",
    "AUXILIARY": "A call beside the agent's work, such as a title or a summary. It is not trained.",
    "ORPHANED": "The answer never reached the agent, and the agent continued without it.",
    "SHARED_PREFIX": "The tokens are trained in another trajectory of the session.",
    "STOP_STRING": "A stop string cut the text. The tokens from there on were dropped.",
    "CONSTRAINED": "The turn was sampled under a constraint, so from another distribution than the "
    "model's own.",
    "IMPORTED": "Another session sampled the tokens, and this one started from them. They are "
    "context, which is not trained.",
    "SPECIAL_TEXT": "Text from outside spells a special token, and became that token.",
    "SAMPLING_CHANGED": "The request's sampling parameters differ from those of the session.",
    "RESTARTED": "Tokens of the turn were discarded, and it was sampled anew.",
    "TRUNCATED_SUPPORT": "top_p, top_k or min_p left tokens out that could not be sampled.",
    "LOGPROB_NOT_FINITE": "The engine returned a log-probability that is not finite. Such a token "
    "is not trained.",
    "MIXED_POLICIES": "Several policies sampled the tokens: the base model and adapters.",
    "COLUMNS_INCOMPLETE": "Rows of a column that the session asked for are missing.",
    "COMPACTION_REJECTED": "The agent declared a compaction that it did not take. It is not "
    "trained.",
    "BUDGET": "A budget of the session ended the turn.",
}
"""Each reason of a trajectory or a node."""
EXCLUDING = (
    "COMPACTION_REJECTED",
    "AUXILIARY",
    "ORPHANED",
    "SHARED_PREFIX",
    "MIXED_POLICIES",
    "LOGPROB_NOT_FINITE",
)
"""The reasons for which sampled tokens are not trained."""
_CONTEXT = "The model did not sample it: it is context, from the chat template or the agent."
_OPEN = "Whether it is trained is decided when the session closes."
_UNKNOWN = "A newer release wrote why. See the reasons of the node."
SHAPES = {
    "MAIN": "It is the main path of the agent's main conversation, or a final answer after all of "
    "that path which is asked without tools.",
    "SIBLING": "It leaves the main path with another sample of a turn.",
    "BRANCH": "It leaves the path of another conversation with another message.",
    "ROOT": "It shares no message with the main conversation, except the system message.",
    "AUXILIARY": "It is one turn beside the main conversation: with at most one token (a probe), "
    "or under another system message without tools or with a tool that takes a title.",
    "SUB_AGENT": "It has another system message than the main conversation, or other tools.",
    "COMPACTION": "It has the system message and the tools of the main conversation, begins after "
    "its last turn, and has a shorter history that holds a recent answer, or quotes one.",
}
"""Each label of a branch: the rules that give it by the shape of the tree."""
RULES = {
    "MAIN_PATH": "It is the main path of the agent's main conversation.",
    "FINAL_ANSWER": "It is a final answer after all of the main path, which is asked without "
    "tools.",
    "OTHER_SAMPLE": "It leaves the main path with another sample of a turn.",
    "OTHER_MESSAGE": "It leaves the main path with another message, after a turn.",
    "SHARED_MESSAGES": "It leaves the main path with another message, before any turn.",
    "OWN_ROOT": "It shares no message with the main conversation, except the system message.",
    "PROBE": "It is one turn of at most one token, cut by the limit of its request: a probe.",
    "WITHOUT_TOOLS": "It is one turn without tools, under another system message than the main "
    "conversation, which has tools.",
    "TITLE_TOOL": "It is one turn whose only tool takes a title, under another system message "
    "than the main conversation.",
    "OTHER_SYSTEM": "It has another system message than the main conversation.",
    "OTHER_TOOLS": "It has the system message of the main conversation, and other tools or "
    "template options.",
    "RECENT_ANSWER": "It begins after the last turn of the main conversation, with the same "
    "system message and tools, and its shorter history holds a recent answer.",
    "QUOTED_ANSWER": "It begins after the last turn of the main conversation, with the same "
    "system message and tools, and a user message of its shorter history quotes a recent answer.",
}
"""Each rule of the gateway. Records of earlier releases do not name theirs."""
SOURCES = {
    "DECLARED": "The agent declared an edge that gives the branch its label.",
    "HEADER": "A request on the branch gave it its label.",
    "RULE": "A rule of the gateway gave the branch its label, by the shape of the tree.",
}
"""Who labelled a branch."""

_REASON = trajectory_pb2.FidelityReason.DESCRIPTOR
_LINEAGE = trajectory_pb2.Lineage.DESCRIPTOR
_SOURCE = trajectory_pb2.LineageSource.DESCRIPTOR
_RULE = trajectory_pb2.LineageRule.DESCRIPTOR


def label_words(lineage: str, source: str, rule: str = "") -> str:
    """Returns why a branch has its label. Empty if that was not recorded.

    Args:
        lineage: The label.
        source: Who labelled it.
        rule: The rule of the gateway. Empty or unknown: all rules that give the label are told.
    """
    said = SOURCES.get(source, "")
    shape = RULES.get(rule) or SHAPES.get(lineage, "")
    return f"{said} {shape}".strip() if source == "RULE" else said


def told_reasons(reasons: Iterable[int]) -> list[str]:
    """Returns each reason with its sentence."""
    names = [name_of(_REASON, one) for one in reasons]
    return [f"{one}. {REASONS.get(one, _UNKNOWN)}" for one in names]


def mask_words(reasons: Collection[str], trained: bool | None) -> dict[str, str]:
    """Returns why tokens of a node are not trained.

    Args:
        reasons: The node's reasons, by name.
        trained: Whether its sampled tokens are. None while the session is open.

    Returns:
        `context`, for tokens that were not sampled, and `untrained`, for those that were.
    """
    excluding = [REASONS[one] for one in EXCLUDING if one in reasons]
    untrained = _OPEN if trained is None else " ".join(excluding) or _UNKNOWN
    context = REASONS["IMPORTED"] if "IMPORTED" in reasons else _CONTEXT
    return {"context": context, "untrained": untrained}


def printable(text: str) -> str:
    """Returns a text without characters that move a terminal's cursor, each a blank instead."""
    return "".join(one if one.isprintable() else " " for one in text)


# A session at a terminal.


def line_of(session: session_pb2.SessionRecord) -> dict[str, Any]:
    """Returns the words of a session's line, by their names in JSON."""
    rows = _rows(session)
    versions = [span.policy_version for row in rows for span in row.version_spans]
    reasons = {reason for row in rows for reason in row.reasons}
    return {
        "closed_unix_ms": session.closed_unix_ms,
        "session_id": session.session_id,
        "run_id": session.run_id,
        "group_id": session.group_id,
        "sample_index": session.sample_index,
        "outcome": name_of(session_pb2.SessionOutcome.DESCRIPTOR, session.outcome),
        "reward": session.reward if session.HasField("reward") else None,
        "turns": session.turns,
        "seconds": (session.closed_unix_ms - session.opened_unix_ms) / 1000,
        "policy": told(max(versions)) if versions else None,
        "reasons": sorted({name_of(_REASON, reason) for reason in reasons} - {"EXACT"}),
        "superseded": session.superseded,
        "error": session.abandoned or session.metadata.get("error", ""),
    }


def words_of(line: dict[str, Any]) -> str:
    """Returns a line for people. It has no character that moves a terminal's cursor."""
    at = datetime.fromtimestamp(line["closed_unix_ms"] / 1000, UTC).strftime("%H:%M:%S")
    reward = "-" if line["reward"] is None else f"{line['reward']:.3f}"
    parts = [at, line["session_id"], f"{line['outcome']:<9}", f"reward {reward}"]
    parts += [f"turns {line['turns']}", f"{line['seconds']:.1f} s", line["policy"] or ""]
    if line["group_id"]:
        parts.append(f"group {line['group_id']} {line['sample_index']}")
    parts += ["superseded"] * line["superseded"] + line["reasons"] + [line["error"][:200]]
    return printable("  ".join(one for one in parts if one))


def why(session: session_pb2.SessionRecord) -> Iterator[str]:
    """Yields lines about a closed session: its labels, and each turn that has a reason.

    A turn is told with its request: the ids that the agent gave it, and its sampling parameters.
    """
    for row in session.trajectories:
        yield _label(f"trajectory of node {row.leaf_node_id}", row)
    nodes: dict[int, Any] = {}
    inner = {node.parent_index for node in session.tree.nodes if node.HasField("parent_index")}
    for at, node in enumerate(session.tree.nodes):
        nodes[node.node_id] = node
        if at not in inner:
            yield _label(f"branch of node {node.node_id}", node)
    for row in session.trajectories:
        for part in row.segments:
            known = nodes.get(part.node_id)
            if known is None or part.trained or (part.sampled and not known.sampled):
                nodes[part.node_id] = part
    for node in nodes.values():
        yield from _turn(node)


def label_of(
    branch: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryNode | gateway_pb2.SessionNode,
) -> str:
    """Returns why a branch has its label, as `label_words`."""
    lineage, rule = name_of(_LINEAGE, branch.lineage), name_of(_RULE, branch.lineage_rule)
    return label_words(lineage, name_of(_SOURCE, branch.lineage_source), rule)


def _label(name: str, branch: trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryNode) -> str:
    return f"{name}: {name_of(_LINEAGE, branch.lineage)}. {label_of(branch)}".rstrip()


def _turn(node: trajectory_pb2.TrajectorySegment | trajectory_pb2.TrajectoryNode) -> Iterator[str]:
    reasons = told_reasons(node.reasons)
    if not reasons and node.trained >= node.sampled:
        return
    state = "trained" if node.trained else "not trained" if node.sampled else "context"
    yield printable(f"node {node.node_id}: {state} {' '.join(node.model_request_ids)}".rstrip())
    yield from (f"  {one}" for one in reasons)
    if node.HasField("sampling"):
        yield printable(f"  sampled with {plain(node.sampling)}")


def _rows(
    session: session_pb2.SessionRecord,
) -> list[trajectory_pb2.Trajectory | trajectory_pb2.TrajectoryTree]:
    trees = [session.tree] if session.HasField("tree") else []
    return [*session.trajectories, *trees]
