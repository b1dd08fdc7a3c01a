"""Pass-through options: any argument of the installed vLLM, by its own name.

vLLM's own command line parser checks them, so an option accepts the same values as in `vllm serve`.
Options that rollmesh sets itself are refused with the name of the setting to use instead.
"""

import difflib
import json
from argparse import SUPPRESS, ArgumentError
from collections.abc import Mapping
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from rollmesh.runtime.config import ConfigError

_OWNED = {
    "model": "the setting model_path",
    "served_model_name": "the setting model",
    "max_model_len": "the setting max_context_tokens",
    "max_num_seqs": "the setting lease_capacity",
    "dtype": "the setting dtype",
    "enforce_eager": "the setting enforce_eager",
    "gpu_memory_utilization": "the setting gpu_memory_utilization",
    "weight_transfer_config": "the setting weight_transfer",
    "disable_log_stats": "the setting metrics_port, which serves vLLM's metrics too",
    "generation_config": "the model's generation_config.json, which names its end tokens",
    "tokenizer": "the tokenizer in model_path, the gateway's",
    "skip_tokenizer_init": "nothing: the engine needs the tokenizer for constraints alone",
    "worker_extension_cls": "nothing: weights reach the workers through it",
    "structured_outputs_config": "nothing: the gateway's constraints are for xgrammar",
    "mm_processor_cache_gb": "the setting image_cache_bytes",
    "logprobs_mode": "nothing: trainers get log-probabilities before temperature and truncation",
}
"""Options that the engine sets itself, and what to use instead."""
_SIMILAR = 3
_MOST_CHARS = 400


def read_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments for `AsyncEngineArgs`.

    Args:
        options: Values by the names of `AsyncEngineArgs`, as read from JSON or TOML.

    Raises:
        ConfigError: An option is unknown, has a value that vLLM does not accept, or is set by
            rollmesh.
    """
    if not options:
        return {}
    parser = AsyncEngineArgs.add_cli_args(_Parser(add_help=False, argument_default=SUPPRESS))
    known = {
        action.dest: action
        for action in parser._actions  # noqa: SLF001 - argparse has no public list
        if action.option_strings
    }
    read: dict[str, Any] = {}
    for name, value in options.items():
        if name in _OWNED:
            raise ConfigError(f"vllm.{name}: is set by rollmesh; use {_OWNED[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, _SIMILAR)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ConfigError(f"vllm.{name}: the installed vLLM has no such option{hint}")
        try:
            read[name] = getattr(parser.parse_args(_words(name, value)), name)
        except (ArgumentError, ValueError, ConfigError) as error:
            said = " ".join(str(error).split())
            raise ConfigError(
                f"vllm.{name}: vLLM does not take {json.dumps(value)}: {said:.{_MOST_CHARS}}"
            ) from error
    return read


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]  # mypy has no vLLM
    """Raises an error instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _words(name: str, value: Any) -> list[str]:
    """Returns an option as command-line arguments."""
    flag = name.replace("_", "-")
    match value:
        case bool():
            return [f"--{flag}" if value else f"--no-{flag}"]
        case list() if value:
            return [f"--{flag}", *(_text(one) for one in value)]
        case _:
            return [f"--{flag}", _text(value)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
