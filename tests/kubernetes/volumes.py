"""Volumes of pods as folders, with the owners and modes that a kubelet gives them."""

import os
import shutil
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path

from tests.kubernetes.rendering import Manifest

_READABLE, _WRITABLE, _ENTERED, _SETGID = 0o440, 0o660, 0o110, 0o2000


def files_of(source: Manifest, objects: list[Manifest]) -> dict[str, bytes]:
    """Returns the files of a ConfigMap, a Secret, or a projection of them, by their paths."""
    if "projected" in source:
        found: dict[str, bytes] = {}
        for one in source["projected"]["sources"]:
            found |= files_of(one, objects)
        return found
    (kind, reference), *_ = source.items()
    name = reference.get("name", reference.get("secretName"))
    kinds = {"configMap": "ConfigMap", "secret": "Secret"}
    (made,) = [
        one for one in objects if one["kind"] == kinds[kind] and one["metadata"]["name"] == name
    ]
    data = made["data"]
    items = {one["key"]: one["path"] for one in reference.get("items", [])}
    keys = items or {key: key for key in data}
    decode = b64decode if kind == "secret" else str.encode
    return {path: decode(data[key]) for key, path in keys.items()}


def write_files(folder: Path, files: Mapping[str, bytes], mode: int, group: int) -> None:
    """Writes files as a kubelet does: root's, readable by the group, swapped by one link."""
    real = folder / "..2026_11_23"
    for path, content in files.items():
        file = real / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    (folder / "..data").symlink_to(real.name)
    for top in {path.partition("/")[0] for path in files}:
        (folder / top).symlink_to(f"..data/{top}")
    for one in (real, *real.rglob("*")):
        os.chown(one, 0, group)
        one.chmod(0o755 | _SETGID | _ENTERED if one.is_dir() else mode | _READABLE)
    folder.chmod(0o755)


def make_volume(
    source: Manifest, folder: Path, group: int, objects: list[Manifest], claims: Path
) -> Path:
    """Makes the folder of a volume. Returns it.

    Args:
        source: The volume of the pod's spec.
        folder: For what belongs to the pod alone.
        group: Its fsGroup.
        objects: Where ConfigMaps and Secrets are.
        claims: Has a folder for each claim, which outlives pods.
    """
    content = {key: value for key, value in source.items() if key != "name"}
    ((kind, what),) = content.items()
    if kind == "persistentVolumeClaim":
        path = claims / str(what["claimName"])
        if not path.exists():
            path.mkdir()
            own_by_group(path, group)
        return path
    path = folder / str(source["name"])
    path.mkdir()
    if kind == "emptyDir":
        own_by_group(path, group)
        path.chmod(0o777 | _SETGID)
        return path
    mode = what.get("defaultMode", 0o644)
    write_files(path, files_of(content, objects), mode, group)
    return path


def own_by_group(path: Path, group: int) -> None:
    """Makes a new volume the group's, as a kubelet does for a pod with fsGroup."""
    os.chown(path, 0, group)
    path.chmod(0o755 | _WRITABLE | _ENTERED | _SETGID)


def fill_claim(claims: Path, name: str, model: Path, group: int) -> None:
    """Fills a claim with the files of a folder."""
    path = claims / name
    shutil.copytree(model, path)
    for one in (path, *path.rglob("*")):
        os.chown(one, 0, group)
        one.chmod(0o2775 if one.is_dir() else 0o664)
