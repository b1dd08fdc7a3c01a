"""The dialect of vLLM 0.32: `/inference/v1/generate`, and the routes of its development mode."""

from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.engine.attached import Answer, Dialect, Row, expect, read_id, well_formed
from rollmesh.engine.backend import (
    FINISHES,
    GenerateInput,
    ModelLimits,
    PauseMode,
    ScoreInput,
    Scores,
    Transfer,
    numerics_of,
)
from rollmesh.engine.requests import check_temperature, vllm_sampling
from rollmesh.runtime.codec import name_of
from rollmesh.runtime.errors import (
    EngineFaultError,
    EngineStartError,
    InvalidFieldError,
    InvalidWeightsError,
    RollmeshError,
    WeightTransferError,
)
from rollmesh.v1 import engine_pb2

_EXTENSION = "rollmesh.engine.vllm.worker_extension.WeightReceiver"
_LOGPROBS_MODES = {"raw_logprobs": "raw", "processed_logprobs": "sampled"}
_NO_NUMBER = -9999.0
"""vLLM writes it in place of NaN and of minus infinity."""


class VllmAnswer(Answer):
    """An answer of `/inference/v1/generate`."""

    def _add(self, part: Any) -> None:
        choices = part["choices"]
        if not choices:  # the last event, with the usage
            self._note_usage(part)
            return
        (choice,) = choices
        expect(choice["index"] == 0 and self.finish is None, "it goes on after its end")
        ids = choice["token_ids"]
        content = (choice["logprobs"] or {}).get("content") or []
        expect(len(ids) == len(content), f"it has {len(content)} log-probs for {len(ids)} ids")
        top = self._request.generate.top_logprobs
        for id_, entry in zip(ids, content, strict=True):
            expect(entry["token_id"] == id_, "a log-prob belongs to another id")
            self._rows.append(_row(entry, top, self._vocabulary))
        reason = choice["finish_reason"]
        if reason is not None:
            spans = choice["weight_versions"] or ()
            self._end(FINISHES[reason], spans, choice["stop_reason"])
            self._note_usage(part)
        else:
            expect(bool(ids), "a part of it is empty")

    def _note_usage(self, part: Any) -> None:
        if usage := part.get("usage"):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            self._note_prompt(usage["prompt_tokens"], cached)


class VllmHttp(Dialect):
    """A vLLM server."""

    name = "vllm-http"
    tested = "0.32"
    generate_path = "/inference/v1/generate"
    alive_path = "/health"
    answers = VllmAnswer
    sleep_flag = "--enable-sleep-mode"
    _has_extension = False
    _ranks = 1
    _most_logprobs = 0
    _fast_prefill = False

    async def describe(self, info: Any) -> None:
        """Reads the server's description.

        Raises:
            EngineStartError: The server does not fit the settings.
            KeyError: A field is missing.
        """
        config = info["vllm_config"]
        model, parallel = config["model_config"], config["parallel_config"]
        if model["multimodal_config"]:
            raise EngineStartError(
                "attach: the server's model takes images, which are not sent to an attached server"
            )
        mode = _LOGPROBS_MODES.get(model["logprobs_mode"], "")
        if mode != self.config.logprobs:
            raise EngineStartError(
                f"logprobs: is {self.config.logprobs!r}, and the attached server was started with "
                f"--logprobs-mode={model['logprobs_mode']}; make them the same"
            )
        context = self.check_context(model["max_model_len"])
        self._has_extension = parallel["worker_extension_cls"] == _EXTENSION
        self._ranks = parallel["data_parallel_size"]
        transfer = config["weight_transfer_config"] or {}
        if self._has_extension:
            self.weight_transfer = transfer.get("backend", "")
        device = config["device_config"]["device"]
        self.may_sleep = model["enable_sleep_mode"] or device == "cpu"
        self.slots = config["scheduler_config"]["max_num_seqs"] * self._ranks
        self._most_logprobs = model["max_logprobs"]
        self._fast_prefill = config["cache_config"]["kv_sharing_fast_prefill"]
        self.limits = ModelLimits(
            self.vocabulary(Path(model["model"])),
            context,
            scores_whole_context=self.config.logprobs == "raw",
        )
        version = (await self.server.get("/version"))["version"]
        attention = await self._on_workers("attention_backends") if self._has_extension else []
        speculative = config["speculative_config"] or {}
        self.numerics = numerics_of(
            self.name,
            self.config.logprobs,
            release=version,
            platform=device,
            dtype=model["dtype"].removeprefix("torch."),
            kv_cache_dtype=config["cache_config"]["cache_dtype"],
            quantization=model["quantization"] or "",
            tensor_parallel=parallel["tensor_parallel_size"],
            pipeline_parallel=parallel["pipeline_parallel_size"],
            data_parallel=parallel["data_parallel_size"],
            expert_parallel=parallel["enable_expert_parallel"],
            attention=_first(attention),
            batch_invariant=info["vllm_env"].get("VLLM_BATCH_INVARIANT") is True,
            speculation=speculative.get("method") or "",
        )

    async def probe(self) -> None:
        """Finds out properties that the description lacks. The server samples.

        Raises:
            EngineStartError: The server does not fit the settings.
        """

    async def weight_name(self, timeout_ms: int = 0) -> Any:
        """Returns the name of the weights, which the server says between two steps."""
        return (await self.server.get("/weight_info", timeout_ms=timeout_ms)).get("weight_version")

    async def rename(self, name: str) -> None:
        await self.server.post("/update_weight_version", {"new_version": name})

    async def is_paused(self) -> bool:
        return (await self.server.get("/is_paused")).get("is_paused") is True

    async def wake_if_asleep(self) -> None:
        """Wakes a server that another engine has put to sleep."""
        if (await self.server.get("/is_sleeping")).get("is_sleeping"):
            await self.server.post("/wake_up")

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stops sampling, with KEEP or ABORT."""
        vllm_mode = name_of(engine_pb2.PauseMode.DESCRIPTOR, mode).lower()
        query = {"mode": vllm_mode, "clear_cache": str(clear_cache).lower()}
        await self.server.post("/pause", query=query)

    async def resume(self) -> None:
        await self.server.post("/resume")

    async def abort(self, ids: list[str]) -> None:
        """Aborts requests. Unknown ones are left out."""
        names = [f"generate-tokens-{id_}" for id_ in ids]
        await self.server.post("/abort_requests", {"request_ids": names})

    async def sleep(self, level: int) -> None:
        await self.server.post("/sleep", query={"level": str(level), "mode": "abort"})

    async def wake_up(self) -> None:
        await self.server.post("/wake_up")

    async def reset_prefix_cache(self) -> bool:
        return (await self.server.post("/reset_prefix_cache")).get("success") is True

    def refuse(self, request: GenerateInput) -> None:
        top = self.candidates(request.generate.top_logprobs)
        self._check_candidates("top_logprobs", top)
        if self.config.logprobs == "sampled":
            check_temperature(request.generate.sampling)
        super().refuse(request)

    def generate_body(self, request: GenerateInput, id_: str) -> dict[str, Any]:
        """Returns the request for a generation. `id_` is its id at the server."""
        params = vllm_sampling(request.generate.sampling)
        params["logprobs"] = self.candidates(request.generate.top_logprobs)
        body: dict[str, Any] = {
            "request_id": id_,
            "token_ids": request.token_ids.tolist(),
            "sampling_params": params,
        }
        if request.max_chunk_tokens:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def candidates(self, top: int) -> int:
        """Returns the number of candidates that the server is asked for at each position."""
        # The server leaves out the last one where the sampled token is none of them.
        return top + 1 if top else 0

    def refuse_score(self, request: ScoreInput) -> None:
        """Refuses a sequence that the server cannot score.

        Raises:
            InvalidFieldError: Names the field.
        """
        if self._fast_prefill:
            raise InvalidFieldError(
                "token_ids_u32le",
                "the attached server has kv_sharing_fast_prefill, with which scores are wrong",
            )
        samples_last = self._samples_last(request)
        top = self.candidates(request.top_k) if samples_last else request.top_k
        self._check_candidates("top_k", top)

    def score_body(self, request: ScoreInput, id_: str) -> dict[str, Any]:
        ids, samples_last = request.token_ids, self._samples_last(request)
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, "detokenize": False}
        params["prompt_logprobs"] = request.top_k
        if samples_last:
            allowed = [int(ids[-1])]
            ids = ids[:-1]
            params |= {"logprobs": self.candidates(request.top_k), "allowed_token_ids": allowed}
        return {"request_id": id_, "token_ids": ids.tolist(), "sampling_params": params}

    def read_scores(self, found: Any, request: ScoreInput) -> tuple[str, Scores] | None:
        """Returns the name of the weights and the scores. None if the request was aborted.

        Raises:
            EngineFaultError: The answer cannot be right.
        """
        with well_formed("scores are"):
            (choice,) = found["choices"]
            if choice["finish_reason"] == "abort":
                return None
            positions = found["prompt_logprobs"]
            expect(positions[0] is None, "the first id has a score")
            rows = [
                [{"token_id": int(id_), **one} for id_, one in row.items()] for row in positions[1:]
            ]
            if self._samples_last(request):
                rows.append(choice["logprobs"]["content"][0]["top_logprobs"])
            ids, top = request.token_ids[request.start :], request.top_k
            rows = rows[len(rows) - len(ids) :]
            expect(len(rows) == len(ids), f"{len(rows)} of {len(ids)} positions were scored")
            logprobs = np.empty(len(ids), np.float32)
            top_ids, values = np.empty((len(ids), top), np.uint32), np.empty((len(ids), top), "f4")
            for at, (id_, row) in enumerate(zip(ids.tolist(), rows, strict=True)):
                (own,) = (one for one in row if one["token_id"] == id_)
                logprobs[at] = _number(own["logprob"], float("nan"))
                likely = sorted(row, key=_rank)[:top]
                top_ids[at] = [one["token_id"] for one in likely]
                values[at] = [_number(one["logprob"], float("-inf")) for one in likely]
            (span, *_) = choice["weight_versions"]
            return str(span["version"]), Scores(logprobs, top_ids, values, 0)

    def _samples_last(self, request: ScoreInput) -> bool:
        """Returns whether the prompt lacks the last id, which is the only one to be sampled."""
        return len(request.token_ids) == self.limits.max_context_tokens

    def _check_candidates(self, field: str, count: int) -> None:
        most = self._most_logprobs
        if 0 <= most < count:
            raise InvalidFieldError(
                field, f"needs a server with --max-logprobs={count}; the attached one has {most}"
            )

    # Weights go through the extension of the server's workers.

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Joins the trainer. Only servers with `weight_transfer` are asked."""
        self._check_takes_weights()
        if problem := _first(await self._on_workers("init_transfer", init_info)):
            raise WeightTransferError(problem)

    async def check_weights(self, source: Path | Transfer) -> None:
        """Checks weights before they are loaded.

        Raises:
            InvalidWeightsError: They do not fit the model.
            InvalidFieldError: The server takes no weights.
        """
        self._check_takes_weights()
        if isinstance(source, Transfer):
            problems = await self._on_workers("check_transfer", list(source.updates))
        else:
            problems = await self._on_workers("check_weights", _path(source))
        if problem := _first(problems):
            raise InvalidWeightsError("weights", problem)

    async def load_weights(self, source: Path | Transfer) -> None:
        """Loads weights that were checked.

        Raises:
            WeightTransferError: Nothing was loaded.
        """
        if isinstance(source, Path):
            await self._on_workers("load_checked_weights", _path(source))
            return
        problems = await self._on_workers("load_transfer", list(source.updates))
        if all(problems):  # nothing was loaded
            raise WeightTransferError(_first(problems))
        if problem := _first(problems):
            raise RollmeshError(problem)

    def _check_takes_weights(self) -> None:
        """Checks that the server has what loads weights.

        Raises:
            InvalidFieldError: It has not.
        """
        if not self._has_extension:
            raise InvalidFieldError(
                "header",
                "the attached server takes no weights; install rollmesh beside its vLLM and start "
                f"it with --worker-extension-cls={_EXTENSION}",
            )
        if self._ranks > 1:
            raise InvalidFieldError(
                "header",
                f"the attached server has {self._ranks} data-parallel ranks and answers for one of "
                "them; load its weights with the backend vllm",
            )

    async def _on_workers(self, method: str, *arguments: object) -> list[str]:
        """Returns the answers of the server's workers to a call of the extension."""
        body = {"method": method, "args": list(arguments)}
        timeout_ms = self.config.weight_transfer_timeout_ms
        answer = await self.server.post("/collective_rpc", body, timeout_ms=timeout_ms)
        results = answer.get("results")
        if not isinstance(results, list):
            raise EngineFaultError(f"the server's workers do not answer {method}")
        return ["" if one is None else str(one) for one in results]


def _row(entry: Any, top: int, size: int) -> Row:
    found = sorted(entry["top_logprobs"], key=_rank)[:top] if top else []
    expect(len(found) == top, f"{len(found)} of {top} most likely ids came")
    return Row(
        read_id(entry["token_id"], size),
        _number(entry["logprob"], float("nan")),
        [read_id(one["token_id"], size) for one in found],
        [_number(one["logprob"], float("-inf")) for one in found],
    )


def _rank(entry: Any) -> int:
    """Returns the sort key of a candidate. A token without a number has no rank."""
    rank = entry["rank"]
    return 2**31 if rank is None else int(rank)


def _number(value: Any, other: float) -> float:
    number = float(value)
    return other if number <= _NO_NUMBER else number


def _path(source: Path) -> str:
    return str(source.absolute())


def _first(answers: list[str]) -> str:
    return next(filter(None, answers), "")
