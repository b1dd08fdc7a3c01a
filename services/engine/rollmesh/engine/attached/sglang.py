"""The dialect of SGLang 0.5.23: `/generate` and its control routes.

- An abort ends every request whose id begins with the given one.
- With `--incremental-streaming-output` an event has the tokens since the last one, else all tokens.
  The abort of a queued request repeats the last one. So new tokens are counted from an event's end.
- The versions of tokens come with the end of an answer.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from rollmesh.engine.attached import (
    NOT_SENT,
    Answer,
    Dialect,
    Row,
    expect,
    read_id,
    well_formed,
)
from rollmesh.engine.attached.server import RefusedError
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
from rollmesh.engine.checkpoints import find_fault, read_headers
from rollmesh.runtime.errors import (
    EngineFaultError,
    EngineStartError,
    InvalidFieldError,
    InvalidSamplingError,
    InvalidWeightsError,
)
from rollmesh.v1 import engine_pb2

_MOST_REPETITION = 2.0
_HOT = 4.0
_SAME = 1e-2
"""Difference of a log-probability at two temperatures that only rounding explains, nats."""
_ERROR = 500
_DROPS_WEIGHTS = 2
_RETURNS_RAW = "SGLANG_RETURN_ORIGINAL_LOGPROB=1"


class SglangAnswer(Answer):
    """An answer of `/generate`."""

    def _add(self, part: Any) -> None:
        expect(self.finish is None, "it goes on after its end")
        meta, ids = part["meta_info"], part["output_ids"]
        entries = meta["output_token_logprobs"]
        new = meta["completion_tokens"] - self.sampled
        expect(0 <= new <= min(len(ids), len(entries)), f"{new} ids are new of {len(ids)}")
        top = self._request.generate.top_logprobs
        rows = _last(meta["output_top_logprobs"], new) if top else [[]] * new
        for id_, entry, row in zip(_last(ids, new), _last(entries, new), rows, strict=True):
            expect(entry[1] == id_, "a log-prob belongs to another id")
            expect(len(row) == top, f"{len(row)} of {top} most likely ids came")
            self._rows.append(
                Row(
                    read_id(id_, self._vocabulary),
                    _number(entry[0]),
                    [read_id(one[1], self._vocabulary) for one in row],
                    [_number(one[0], float("-inf")) for one in row],
                )
            )
        reason = meta["finish_reason"]
        if reason is not None:
            self._end(FINISHES[reason["type"]], meta["weight_versions"], reason.get("matched"))
        if "prompt_tokens" in meta:  # not where a request is aborted in the queue
            self._note_prompt(meta["prompt_tokens"], meta["cached_tokens"])


class Sglang(Dialect):
    """An SGLang server."""

    name = "sglang"
    tested = "0.5.23"
    generate_path = "/generate"
    alive_path = "/server_info"  # the others answer although the model is gone, or sample
    answers = SglangAnswer
    sleep_flag = "--enable-memory-saver"
    aborts_late = True
    tells_sleep = False
    _takes_seeds = False
    _backs_weights_up = False
    _served = Path()
    _holds_in_place = False
    """Whether a pause stopped running requests where they are."""
    _released: tuple[str, ...] = ()
    """The memory that a sleep has freed."""

    async def describe(self, info: Any) -> None:
        model = await self.server.get("/model_info")
        if not model["is_generation"] or info["disaggregation_mode"] != "null":
            raise EngineStartError(
                "attach: the server embeds, or splits prefill from decoding; attach to one that "
                "generates alone"
            )
        if model["has_image_understanding"] or model["has_audio_understanding"]:
            raise EngineStartError(
                "attach: the server's model takes images, which are not sent to an attached server"
            )
        # A prompt must be shorter, and the answer to the longest one fits then, too.
        context = self.check_context(info["max_req_input_len"] - 1)
        self._served = Path(info["model_path"])
        self.may_sleep = info["enable_memory_saver"] or info["device"] == "cpu"
        self._backs_weights_up = info["enable_weights_cpu_backup"]
        self._takes_seeds = info["enable_deterministic_inference"]
        states = info["internal_states"]
        self.slots = sum(one["effective_max_running_requests_per_dp"] for one in states)
        self._lock = asyncio.Lock()  # a pause ends before the next call begins
        vocabulary = self.vocabulary(self._served)
        self.limits = ModelLimits(vocabulary, context, scores_whole_context=True)
        self.numerics = numerics_of(
            self.name,
            self.config.logprobs,
            release=info["version"],
            platform=info["device"],
            dtype=info["dtype"],
            kv_cache_dtype=info["kv_cache_dtype"],
            quantization=info["quantization"] or "",
            tensor_parallel=info["tp_size"],
            pipeline_parallel=info["pp_size"],
            data_parallel=info["dp_size"],
            expert_parallel=info["ep_size"] > 1,
            attention=info["attention_backend"] or "",
            batch_invariant=info["enable_deterministic_inference"],
            speculation=info["speculative_algorithm"] or "",
        )

    async def probe(self) -> None:
        cold, hot = [await self._likeliest(one) for one in (1.0, _HOT)]
        found = "raw" if abs(cold - hot) < _SAME else "sampled"
        if found != self.config.logprobs:
            raise EngineStartError(
                f"logprobs: is {self.config.logprobs!r}, and the attached server returns those "
                f"for {found!r}; start it {'without' if found == 'raw' else 'with'} {_RETURNS_RAW}"
            )

    async def _likeliest(self, temperature: float) -> float:
        """Returns the log-probability of the most likely id after an id, as the server says it."""
        body = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature},
            "return_logprob": True,
            "top_logprobs_num": 1,
        }
        answer = await self.server.post(self.generate_path, body)
        with well_formed("answer is"):
            if "weight_versions" not in answer["meta_info"]:
                raise EngineStartError(
                    "attach: the server does not say which weights sampled a token; give it a "
                    f"release like {self.tested}"
                )
            return float(answer["meta_info"]["output_top_logprobs"][0][0][0])

    async def weight_name(self, timeout_ms: int = 0) -> Any:
        info = await self.server.get("/server_info", timeout_ms=timeout_ms)
        with well_formed("description is"):
            names = {one["weight_version"] for one in info["internal_states"]}
        if len(names) != 1:
            raise EngineFaultError(f"the server's ranks have weights of {len(names)} names")
        return names.pop()

    async def rename(self, name: str) -> None:
        # By default it would abort every request.
        body = {"new_version": name, "abort_all_requests": False}
        await self.server.post("/update_weight_version", body)

    async def wake_if_asleep(self) -> None:
        pass  # the name of its weights tells no version then

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        # `retract` puts requests back into the queue, so that their part of the cache can be
        # dropped and they can be aborted. `abort` would end the requests of other clients, too.
        in_place = mode == engine_pb2.PAUSE_MODE_KEEP and not clear_cache
        async with self._lock:
            way = "in_place" if in_place else "retract"
            await self.server.post("/pause_generation", {"mode": way})
            self._holds_in_place = in_place

    async def is_paused(self) -> bool:
        return False  # it does not say

    async def resume(self) -> None:
        async with self._lock:
            await self.server.post("/continue_generation", {})
            self._holds_in_place = False

    async def abort(self, ids: list[str]) -> None:
        async with self._lock:
            if self._holds_in_place:  # else they would end with the next step
                await self.server.post("/pause_generation", {"mode": "retract"})
                self._holds_in_place = False
            for id_ in ids:
                await self.server.post("/abort_request", {"rid": id_})

    async def sleep(self, level: int) -> None:
        drops = level == _DROPS_WEIGHTS or self._backs_weights_up
        self._released = ("kv_cache", "weights") if drops else ("kv_cache",)
        await self.server.post("/release_memory_occupation", {"tags": self._released})

    async def wake_up(self) -> None:
        if self._released:
            await self.server.post("/resume_memory_occupation", {"tags": self._released})
        self._released = ()

    async def reset_prefix_cache(self) -> bool:
        try:
            await self.server.post("/flush_cache")
        except RefusedError as error:
            if error.status >= _ERROR:
                raise
            return False
        return True

    def refuse(self, request: GenerateInput) -> None:
        super().refuse(request)
        sampling, raw = request.generate.sampling, self.config.logprobs == "raw"
        changed = "changes the log-probabilities that an SGLang server returns as raw ones"
        cut = "is not in the log-probabilities that an SGLang server returns as sampled ones"
        not_sent = "is not sent to an SGLang server; ask an engine with the backend vllm"
        seeds = "needs an SGLang server with --enable-deterministic-inference"
        ignores = "would make an SGLang server ignore stop_token_ids; give one of them"
        most = f"is at most {_MOST_REPETITION:g} at an SGLang server"
        cuts = not raw and sampling.temperature > 0
        for name, refused, why in (
            ("allowed_token_ids", bool(sampling.allowed_token_ids), not_sent),
            ("seed", sampling.HasField("seed") and not self._takes_seeds, seeds),
            ("ignore_eos", sampling.ignore_eos and bool(sampling.stop_token_ids), ignores),
            ("repetition_penalty", sampling.repetition_penalty > _MOST_REPETITION, most),
            ("repetition_penalty", raw and sampling.repetition_penalty != 1, changed),
            ("presence_penalty", raw and sampling.presence_penalty != 0, changed),
            ("frequency_penalty", raw and sampling.frequency_penalty != 0, changed),
            ("logit_bias", raw and bool(sampling.logit_bias), changed),
            ("min_tokens", raw and sampling.min_tokens > 0, changed),
            ("top_p", cuts and sampling.top_p < 1, cut),
            ("top_k", cuts and sampling.top_k > 0, cut),
            ("min_p", cuts and sampling.min_p > 0, cut),
        ):
            if refused:
                raise InvalidSamplingError(f"sampling.{name}", why)

    def generate_body(self, request: GenerateInput, id_: str) -> dict[str, Any]:
        generate, sampling = request.generate, request.generate.sampling
        params: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "max_new_tokens": sampling.max_tokens,
            "min_new_tokens": sampling.min_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "ignore_eos": sampling.ignore_eos,
        }
        if sampling.HasField("seed"):
            params["sampling_seed"] = sampling.seed
        if sampling.logit_bias:
            params["logit_bias"] = {str(one): bias for one, bias in sampling.logit_bias.items()}
        return {
            "rid": id_,
            "input_ids": request.token_ids.tolist(),
            "sampling_params": params,
            "return_logprob": True,
            "top_logprobs_num": generate.top_logprobs,
            "stream": request.max_chunk_tokens > 0,
        }

    def candidates(self, top: int) -> int:
        return top

    def refuse_score(self, request: ScoreInput) -> None:
        pass

    def score_body(self, request: ScoreInput, id_: str) -> dict[str, Any]:
        return {
            "rid": id_,
            "input_ids": request.token_ids.tolist(),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": request.start - 1,  # the first one has no log-probability
            "top_logprobs_num": request.top_k,
        }

    def read_scores(self, found: Any, request: ScoreInput) -> tuple[str, Scores] | None:
        with well_formed("scores are"):
            meta = found["meta_info"]
            if meta["finish_reason"]["type"] == "abort":
                return None
            ids = request.token_ids[request.start :].tolist()
            own, count, top = meta["input_token_logprobs"][1:], len(ids), request.top_k
            expect([one[1] for one in own] == ids, "the scores are those of other ids")
            rows = meta["input_top_logprobs"][1:] if top else [[]] * count
            expect([len(row) for row in rows] == [top] * count, f"not every id has {top} others")
            logprobs = np.array([_number(one[0]) for one in own], np.float32)
            top_ids = np.array([[one[1] for one in row] for row in rows], np.uint32)
            values = np.array([[_number(one[0]) for one in row] for row in rows], np.float32)
            (span, *_) = meta["weight_versions"]
            shape = (count, top)
            scores = Scores(logprobs, top_ids.reshape(shape), values.reshape(shape), 0)
            return str(span["version"]), scores

    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        raise InvalidFieldError("header.transfer", NOT_SENT)

    async def check_weights(self, source: Path | Transfer) -> None:
        if isinstance(source, Transfer):
            raise InvalidFieldError("header.transfer", "is not offered to an SGLang server")
        try:
            wanted = await asyncio.to_thread(read_headers, self._served)
        except (safetensors.SafetensorError, OSError) as error:
            raise InvalidFieldError(
                "header",
                "the attached server's model cannot be read, with which new weights are compared: "
                f"{error}; give the engine the server's file system",
            ) from error
        try:
            problem = await asyncio.to_thread(find_fault, source, wanted, tied=False)
        except (safetensors.SafetensorError, OSError) as error:
            raise InvalidWeightsError("weights", f"cannot be read: {error}") from error
        if problem:
            raise InvalidWeightsError("weights", problem)

    async def load_weights(self, source: Path | Transfer) -> None:
        if isinstance(source, Transfer):
            raise TypeError("check_weights refuses transfers")
        # An upload is the only file of its folder.
        is_folder = await asyncio.to_thread(source.is_dir)
        await self.server.post(
            "/update_weights_from_disk",
            {"model_path": str((source if is_folder else source.parent).absolute())},
            timeout_ms=self.config.weight_transfer_timeout_ms,
        )


def _last(values: list[Any], count: int) -> list[Any]:
    return values[len(values) - count :]


def _number(value: Any, other: float = float("nan")) -> float:
    """Returns a log-probability. JSON has no word for those that are not finite."""
    return other if value is None else float(value)
