"""The differences between kinds of servers: routes, requests, answers and limits."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from rollmesh.engine.attached.answers import Answer
from rollmesh.engine.attached.server import Server
from rollmesh.engine.backend import (
    GenerateInput,
    ModelLimits,
    PauseMode,
    ScoreInput,
    Scores,
    Transfer,
)
from rollmesh.engine.config import EngineConfig
from rollmesh.runtime.errors import (
    EngineStartError,
    InvalidConstraintError,
    InvalidFieldError,
    InvalidSamplingError,
)
from rollmesh.v1 import sampling_pb2

NOT_SENT = "is not sent to an attached server; ask an engine with the backend vllm"


class Dialect(ABC):
    """One kind of server. `backend` calls it, and types the errors of the server."""

    name: ClassVar[str]
    """Name of the backend."""
    tested: ClassVar[str]
    """Release that the tests run."""
    generate_path: ClassVar[str]
    alive_path: ClassVar[str]
    """Path of a GET that fails if the model died."""
    aborts_late: ClassVar[bool] = False
    """Whether a closed connection ends its request only later."""
    tells_sleep: ClassVar[bool] = True
    """Whether the server says that it is asleep."""

    def __init__(self, server: Server, config: EngineConfig) -> None:
        """Takes the server and the settings of the engine."""
        self.server = server
        self.config = config
        self.limits = ModelLimits(0, 0)
        self.numerics = sampling_pb2.Numerics()
        self.weight_transfer = ""
        self.slots = 1
        """Number of requests that the server samples at the same time."""

    # Attaching.

    @abstractmethod
    async def describe(self, info: Any) -> None:
        """Reads the server's description.

        Raises:
            EngineStartError: The server does not fit the settings.
            KeyError: A field is missing.
        """

    @abstractmethod
    async def probe(self) -> None:
        """Finds out properties that the description lacks. The server samples.

        Raises:
            EngineStartError: The server does not fit the settings.
        """

    def check_context(self, most: int) -> int:
        """Returns the maximum context, tokens.

        Raises:
            EngineStartError: The setting is above the server's maximum.
        """
        wanted = self.config.max_context_tokens
        if wanted > most:
            raise EngineStartError(
                f"max_context_tokens: is {wanted}, and the attached server has {most}; give at "
                "most that"
            )
        return wanted or most

    # The name of the weights, and pauses.

    @abstractmethod
    async def weight_name(self, timeout_ms: int = 0) -> Any:
        """Returns the name of the weights, which the server says between two steps."""

    @abstractmethod
    async def rename(self, name: str) -> None:
        """Names the weights."""

    async def is_paused(self) -> bool:
        """Returns whether the server says that it is paused."""
        return False

    @abstractmethod
    async def wake_if_asleep(self) -> None:
        """Wakes a server that another engine has put to sleep."""

    @abstractmethod
    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stops sampling, with KEEP or ABORT."""

    @abstractmethod
    async def resume(self) -> None:
        """Resumes sampling."""

    @abstractmethod
    async def abort(self, ids: list[str]) -> None:
        """Aborts requests. Unknown ones are left out."""

    @abstractmethod
    def check_sleep(self) -> None:
        """Checks that the server can sleep.

        Raises:
            InvalidFieldError: It cannot.
        """

    @abstractmethod
    async def sleep(self, level: int) -> None:
        """Frees accelerator memory of a paused server."""

    @abstractmethod
    async def wake_up(self) -> None:
        """Reallocates the accelerator memory."""

    @abstractmethod
    async def reset_prefix_cache(self) -> bool:
        """Drops cached prefixes. Returns whether it succeeded."""

    # Requests and answers.

    def refuse(self, request: GenerateInput) -> None:
        """Refuses the fields that the server does not have.

        Raises:
            InvalidFieldError: Names the field.
        """
        generate = request.generate
        if generate.HasField("constraint"):
            raise InvalidConstraintError("constraint", NOT_SENT)
        if generate.banned_token_ids:
            raise InvalidFieldError("banned_token_ids", NOT_SENT)
        if generate.sampling.bad_sequences:
            raise InvalidSamplingError("sampling.bad_sequences", NOT_SENT)
        if generate.images:
            raise InvalidFieldError("images", NOT_SENT)

    @abstractmethod
    def generate_body(self, request: GenerateInput, id_: str) -> dict[str, Any]:
        """Returns the request for a generation. `id_` is its id at the server."""

    @abstractmethod
    def candidates(self, top: int) -> int:
        """Returns the number of candidates that the server is asked for at each position."""

    @abstractmethod
    def answer(self, request: GenerateInput, version_of: Callable[[str], int]) -> Answer:
        """Returns what reads the answer."""

    @abstractmethod
    def refuse_score(self, request: ScoreInput) -> None:
        """Refuses a sequence that the server cannot score.

        Raises:
            InvalidFieldError: Names the field.
        """

    @abstractmethod
    def score_body(self, request: ScoreInput, id_: str) -> dict[str, Any]:
        """Returns the request to score a sequence. `id_` is its id at the server."""

    @abstractmethod
    def read_scores(self, found: Any, request: ScoreInput) -> tuple[str, Scores] | None:
        """Returns the name of the weights and the scores. None if the request was aborted.

        Raises:
            EngineFaultError: The answer cannot be right.
        """

    # Weights.

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Joins the trainer. Only servers with `weight_transfer` are asked."""
        raise InvalidFieldError("header.transfer", NOT_SENT)

    @abstractmethod
    async def check_weights(self, source: Path | Transfer) -> None:
        """Checks weights before they are loaded.

        Raises:
            InvalidWeightsError: They do not fit the model.
            InvalidFieldError: The server takes no weights.
        """

    @abstractmethod
    async def load_weights(self, source: Path | Transfer) -> None:
        """Loads weights that were checked.

        Raises:
            WeightTransferError: Nothing was loaded.
        """


def vocabulary(config: EngineConfig, served: Path) -> int:
    """Returns the size of the vocabulary, which the server does not say.

    Raises:
        EngineStartError: No setting and no file says it either.
    """
    if config.vocabulary_tokens:
        return config.vocabulary_tokens
    for folder in (served, config.model_path):
        try:
            found = json.loads((folder / "config.json").read_text())
            return int((found | found.get("text_config", {}))["vocab_size"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue
    raise EngineStartError(
        "vocabulary_tokens: the server does not say it; give it, or in model_path the folder of "
        "the server's model"
    )
