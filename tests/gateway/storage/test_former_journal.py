"""Journals of former releases: a gateway reads them, and knows the retries of their requests.

`journal_16.sql` is a dump of the journal of one session, and `journal_16.json` has its requests and
the ids of their answers. Both were made by the release whose journals have version 16. Journals of
version 15 lack a column.
"""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from google.protobuf import json_format

from rollmesh.client import Subscription
from rollmesh.v1 import gateway_pb2, session_pb2, trajectory_pb2
from tests.gateway.live import LiveMesh
from tests.messages import said

HERE = Path(__file__).parent
TIMEOUT_S = 180


@pytest.mark.parametrize("version", [15, 16])
async def test_a_journal_of_a_former_release_is_read(
    tmp_path: Path, tokenizer_dir: Path, version: int
) -> None:
    (tmp_path / "gateway").mkdir()
    with closing(sqlite3.connect(tmp_path / "gateway" / "journal.sqlite")) as database:
        database.executescript((HERE / "journal_16.sql").read_text())
        if version < 16:
            database.execute("ALTER TABLE nodes DROP COLUMN sampling")
            database.execute(f"PRAGMA user_version = {version:d}")
    former = json.loads((HERE / "journal_16.json").read_text())
    key = former["session_key"]
    request, answer = gateway_pb2.ChatRequest(), gateway_pb2.ChatAnswer()
    async with LiveMesh(tmp_path, tokenizer_dir) as mesh:
        for fields, answer_id in former["asked"]:
            request = json_format.ParseDict(fields, gateway_pb2.ChatRequest(session_key=key))
            if not request.idempotency_key:
                request.retry_count = 1
            (answer,) = (await mesh.stub.Chat(request, timeout=TIMEOUT_S)).answers
            assert trajectory_pb2.FIDELITY_REASON_RETRY_REPLAY in answer.reasons
            if fields != former["asked"][0][0]:  # which has an equal sibling
                assert answer.answer_id == answer_id
        request.messages.extend([answer.message, said("go on")])
        request.retry_count = 0
        (fresh,) = (await mesh.stub.Chat(request, timeout=TIMEOUT_S)).answers
        assert fresh.prompt_tokens > answer.prompt_tokens + answer.completion_tokens
        await mesh.stub.CloseSession(
            gateway_pb2.CloseSessionRequest(
                session_id=former["session_id"],
                session_key=key,
                outcome=session_pb2.SESSION_OUTCOME_COMPLETED,
            )
        )
        async with Subscription(mesh.collector, consumer="t", unit="session") as deliveries:
            (delivered,) = (await anext(deliveries)).sessions
    assert delivered.turns == len(former["asked"]) + 1
    assert (delivered.group_id, delivered.run_id, delivered.metadata) == ("g", "r", {"task": "t"})
