"""Group sizes known to a gateway; all sessions of a group must give the same size."""

from collections import OrderedDict

from rollmesh.runtime.errors import GroupSizeError

_MOST_GROUPS = 65_536


class GroupSizes:
    """The sizes of the most recently used groups."""

    def __init__(self) -> None:
        """Starts without groups."""
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def check(self, group_id: str, size: int) -> None:
        """Checks the size that a new session gives for its group.

        Raises:
            GroupSizeError: Another session of the group gave a different size.
        """
        known = self._sizes.get(group_id, size)
        if group_id and known != size:
            raise GroupSizeError(
                "group_size",
                f"is {size}, and group {group_id!r} has {known}; give all its sessions one",
            )

    def add(self, group_id: str, size: int) -> None:
        """Records a group's session; the least recently used group may be evicted."""
        if group_id:
            self._sizes.setdefault(group_id, size)
            self._sizes.move_to_end(group_id)
            if len(self._sizes) > _MOST_GROUPS:
                self._sizes.popitem(last=False)
