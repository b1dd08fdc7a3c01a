"""What is said about a store of another release; neither an older nor a newer one is changed."""


def refusal(where: str, found: int, version: int, rescue: str) -> str:
    """Returns why a store is refused, and what its operator can do.

    Args:
        where: The file, or the database.
        found: Version of its tables.
        version: Version that this release needs.
        rescue: What a release that knows the tables does with what is in them, and the
            alternative.
    """
    writer = "an earlier" if found < version else "a later"
    return (
        f"{where} has version {found}, this release needs {version}; nothing was changed. "
        f"It was written by {writer} release: {rescue}"
    )
