"""What the Dockerfiles say of the images that the manifests name."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.paths import ROOT

_FILES = {
    "rollmesh-router": ("services/router/Dockerfile", ""),
    "rollmesh-collector": ("services/collector/Dockerfile", ""),
    "rollmesh-gateway": ("services/gateway/Dockerfile", ""),
    "rollmesh-sidecar": ("clients/Dockerfile", ""),
    "rollmesh-engine": ("services/engine/Dockerfile", "cpu"),
    "rollmesh-engine-gpu": ("services/engine/Dockerfile", "gpu"),
    "rollmesh-policy": ("services/engine/Dockerfile", "policy"),
}
"""File and stage of each image. Without a stage the last one."""


@dataclass(frozen=True)
class Image:
    """An image."""

    uid: int
    """Of the user that its processes run as."""
    entrypoint: tuple[str, ...]
    environment: dict[str, str]


@cache
def image(name: str) -> Image:
    """Returns an image by its name in the manifests."""
    file, wanted = _FILES[name]
    stages = _stages(ROOT / file)
    text = stages[wanted or list(stages)[-1]]
    (uid,) = {int(one) for one in re.findall(r"useradd --uid (\d+)", text)}
    assert re.findall(r"^USER (\w+)$", text, re.M)[-1] == "rollmesh"
    entrypoint: list[str] = json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.M)[-1])
    found = re.findall(r"^ENV (.*)$", text, re.M)
    pairs = [pair.partition("=") for line in found for pair in line.split()]
    return Image(uid, tuple(entrypoint), {key: value for key, _, value in pairs})


def _stages(path: Path) -> dict[str, str]:
    """The text of each stage, with that of the stages of this file that it is built upon."""
    stages: dict[str, str] = {}
    text = path.read_text().replace("\\\n", " ")
    for part in re.split(r"^(?=FROM )", text, flags=re.M)[1:]:
        base, name = re.findall(r"^FROM (\S+)(?: AS (\w+))?", part)[0]
        stages[name or "last"] = stages.get(base, "") + part
    return stages
