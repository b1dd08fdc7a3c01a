"""The words of `rollmesh status`, `tail`, `doctor` and `top`, for people at a terminal."""


def plain(text: str) -> str:
    """Returns a text without characters that move a terminal's cursor, each a blank instead."""
    return "".join(one if one.isprintable() else " " for one in text)
