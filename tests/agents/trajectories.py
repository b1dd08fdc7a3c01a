"""What a session left with the collector, checked to the token."""

from examples.demo.audit import Audit
from rollmesh.chat import Tokenizer
from rollmesh.client import Client, Session, SessionResult
from tests import meshes
from tests.meshes import Mesh


async def delivered(client: Client, session: Session) -> SessionResult:
    """The record of a closed session, checked: nothing drifted, was lost, or counts twice."""
    result = await meshes.delivered(client, session)
    audit = Audit()
    audit.received([result])
    assert (audit.drift_tokens, audit.duplicated) == (0, 0)
    assert sum(audit.trained.values()) == result.turns
    return result


def check_main(mesh: Mesh, result: SessionResult, replies: list[str], *reasons: str) -> None:
    """Asserts that a session is one conversation that holds the replies as they were sampled."""
    (trajectory,) = result.trajectories
    encode = Tokenizer(mesh.model).encode
    assert (trajectory.lineage, trajectory.turns) == ("MAIN", len(replies))
    # The template would drop the reasoning of earlier turns by now, and the session says so.
    other = tuple(reason for reason in trajectory.reasons if reason != "TEMPLATE_REWRITE")
    assert (other or ("EXACT",)) == (reasons or ("EXACT",))
    sampled = [trajectory.token_ids[s.start : s.end] for s in trajectory.segments if s.sampled]
    assert [ids.tolist() for ids in sampled] == [
        encode(f"{reply}<|im_end|>").tolist() for reply in replies
    ]
