"""The RPC of the scorer."""

from rollmesh.runtime.rpc.interceptors import Context
from rollmesh.scorer.workers import Workers
from rollmesh.v1 import scorer_pb2, scorer_pb2_grpc


class ScorerServicer(scorer_pb2_grpc.ScorerServiceServicer):
    """Gives each session to a worker."""

    def __init__(self, workers: Workers) -> None:
        """Takes the workers, which the service starts and stops."""
        self._workers = workers

    async def Score(
        self, request: scorer_pb2.ScoreRequest, context: Context
    ) -> scorer_pb2.ScoreResponse:
        return scorer_pb2.ScoreResponse(rewards=await self._workers.score(request.session))
