"""The files of a checkpoint that a request names."""

from pathlib import Path

_MOST_FILES = 4096


def weight_files(source: Path) -> list[Path]:
    """Returns the safetensors files of a directory, or the file itself.

    Links are followed, because caches of models consist of them; only safetensors are read.

    Raises:
        OSError: There are too many, or one is a pipe or a device, on which reading would wait.
    """
    files = sorted(source.glob("*.safetensors")) if source.is_dir() else [source]
    if len(files) > _MOST_FILES:
        raise OSError(
            f"{source} has {len(files)} safetensors files; at most {_MOST_FILES} are read"
        )
    for path in files:
        if path.exists() and not path.is_file():
            raise OSError(f"{path} is no regular file")
    return files
