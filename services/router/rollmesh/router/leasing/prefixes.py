"""Which engines have the beginning of a prompt in their KV cache, as far as leases tell."""

from collections import OrderedDict
from collections.abc import Collection, Sequence

from rollmesh.router.leasing.engines import Engine

_MOST_PREFIXES = 65_536
_MOST_HOLDERS = 16


class Prefixes:
    """The prefixes that were used last, and the engines that were leased for them.

    New weights empty the KV cache, so an engine counts only with the weights that it had.
    """

    def __init__(self, most_prefixes: int = _MOST_PREFIXES) -> None:
        """Starts empty.

        Args:
            most_prefixes: Maximum number of prefixes to remember.
        """
        self._most = most_prefixes
        self._holders: OrderedDict[int, dict[Engine, int]] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of prefixes."""
        return len(self._holders)

    def used(self, prefixes: Sequence[int], engine: Engine) -> None:
        """Notes that an engine is leased for a prompt; of many engines the last 16 are kept."""
        for prefix in prefixes:
            holders = self._holders.setdefault(prefix, {})
            self._holders.move_to_end(prefix)
            holders.pop(engine, None)
            holders[engine] = engine.policy_version
            if len(holders) > _MOST_HOLDERS:
                del holders[next(iter(holders))]
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def holders(self, prefixes: Sequence[int]) -> list[Collection[Engine]]:
        """Returns the engines that hold prefixes of a prompt, those of the longest first.

        Args:
            prefixes: Digests of the prefixes, the shortest first.
        """
        return [
            [one for one, version in found.items() if one.policy_version == version]
            for prefix in reversed(prefixes)
            if (found := self._holders.get(prefix)) is not None
        ]

    def forget(self, engine: Engine) -> None:
        """Forgets an engine that has left."""
        for holders in self._holders.values():
            holders.pop(engine, None)
