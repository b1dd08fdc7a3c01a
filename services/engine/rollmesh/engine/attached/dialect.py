"""The differences between kinds of servers: routes, requests, answers and limits."""

import json
from pathlib import Path
from typing import ClassVar

from rollmesh.engine.attached.answers import Answer
from rollmesh.engine.attached.server import Server
from rollmesh.engine.backend import GenerateInput, ModelLimits
from rollmesh.engine.config import EngineConfig
from rollmesh.runtime.errors import (
    EngineStartError,
    InvalidConstraintError,
    InvalidFieldError,
    InvalidSamplingError,
)
from rollmesh.v1 import sampling_pb2

NOT_SENT = "is not sent to an attached server; ask an engine with the backend vllm"


class Dialect:
    """One kind of server. `backend` calls it, and types the errors of the server.

    Each kind adds the calls of `VllmHttp`.
    """

    name: ClassVar[str]
    """Name of the backend."""
    tested: ClassVar[str]
    """Release that the tests run."""
    generate_path: ClassVar[str]
    alive_path: ClassVar[str]
    """Path of a GET that fails if the model died."""
    answers: ClassVar[type[Answer]]
    """Reads the answers."""
    sleep_flag: ClassVar[str]
    """Lets a server sleep."""
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
        self.may_sleep = False
        self.slots = 1
        """Number of requests that the server samples at the same time."""

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

    def vocabulary(self, served: Path) -> int:
        """Returns the size of the vocabulary, which the server does not say.

        Raises:
            EngineStartError: No setting and no file says it either.
        """
        if self.config.vocabulary_tokens:
            return self.config.vocabulary_tokens
        for folder in (served, self.config.model_path):
            try:
                found = json.loads((folder / "config.json").read_text())
                return int((found | found.get("text_config", {}))["vocab_size"])
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                continue
        raise EngineStartError(
            "vocabulary_tokens: the server does not say it; give it, or in model_path the folder "
            "of the server's model"
        )

    def check_sleep(self) -> None:
        """Checks that the server can sleep.

        Raises:
            InvalidFieldError: It cannot.
        """
        if not self.may_sleep:
            raise InvalidFieldError(
                "level", f"the attached server cannot sleep; start it with {self.sleep_flag}"
            )

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
