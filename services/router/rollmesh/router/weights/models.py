"""The models of a mesh: their engines, and the weights that those must hold."""

import asyncio
from contextlib import suppress
from pathlib import Path

from rollmesh.router import metrics
from rollmesh.router.leasing.engines import Engine, Target
from rollmesh.router.leasing.fleet import Fleet
from rollmesh.router.membership.members import Members
from rollmesh.router.weights.kept import KeptWeights, check_folder, kept_models
from rollmesh.runtime import clock
from rollmesh.runtime.errors import InvalidFieldError
from rollmesh.v1 import engine_pb2, router_pb2


class Models:
    """The models of engines and gateways, and those with kept weights.

    Invariant: the fleet's target of a model is `current` of its kept weights, and its offer is
    `offered`.
    """

    def __init__(self, fleet: Fleet, members: Members, data_dir: Path, gather_ms: int = 0) -> None:
        """Takes the state of the mesh and the folder of kept weights.

        Args:
            fleet: The engines.
            members: Engines, gateways and collectors.
            data_dir: Folder of the kept weights.
            gather_ms: Time from now in which engines register again, milliseconds.
        """
        self._gathered_ms = clock.monotonic_ms() + gather_ms
        self._fleet = fleet
        self._members = members
        self._data_dir = data_dir
        self._kept: dict[str, KeptWeights] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def restore(self) -> None:
        """Reads the kept weights of earlier runs, in a thread.

        Raises:
            StoreError: The folder cannot be read or written.
        """
        for kept in await asyncio.to_thread(_restored, self._data_dir):
            self._kept[kept.model] = kept
            self.show(kept)

    def names(self) -> set[str]:
        """Returns the models of engines and gateways, and those with kept weights."""
        return self._members.models() | {name for name, kept in self._kept.items() if kept.current}

    def weights(self) -> list[router_pb2.ModelWeights]:
        """Returns the target and the last version of every model, sorted by name."""
        return [
            router_pb2.ModelWeights(
                model=name,
                target_policy_version=self.kept(name).target_version,
                last_policy_version=self.kept(name).last_version,
            )
            for name in sorted(self.names())
        ]

    def named(self, model: str, field: str = "model") -> str:
        """Returns the model that a call names; an empty name means the only model.

        Args:
            model: Name given in the call.
            field: Name of the field, for errors.

        Raises:
            InvalidFieldError: The mesh does not have the model, or has several and none is named.
        """
        known = sorted(self.names())
        if model in known or (not model and len(known) == 1):
            return model or known[0]
        names = ", ".join(known) or "none: no engine or gateway is registered yet"
        problem = f"{model!r} is not in the mesh" if model else "is empty"
        raise InvalidFieldError(field, f"{problem}; give one of those there are ({names})")

    async def gathered(self) -> None:
        """Returns once engines can have registered again after this router's start."""
        if (wait_ms := self._gathered_ms - clock.monotonic_ms()) > 0:
            await asyncio.sleep(wait_ms / 1000)

    async def named_when_known(self, model: str, field: str = "model") -> str:
        """Returns the model that a call names; waits only while it may not have registered yet.

        Raises:
            InvalidFieldError: As by `named`.
        """
        if model not in self.names():
            await self.gathered()
        return self.named(model, field)

    def loads(self, model: str) -> list[router_pb2.ReplicaLoad]:
        """Returns the last loads of the engines of a model."""
        return [
            hello.load
            for hello in self._members.hellos()
            if hello.kind == router_pb2.REPLICA_KIND_ENGINE and hello.model == model
        ]

    def engines(self, model: str) -> list[Engine]:
        """Returns the registered engines of a model."""
        return self._fleet.of_model(model)

    def kept(self, model: str) -> KeptWeights:
        """Returns the kept weights of a model."""
        kept = self._kept.get(model)
        if kept is None:
            kept = self._kept[model] = KeptWeights(self._data_dir, model)
        return kept

    def left(self, model: str) -> None:
        """Forgets a model whose last member has left, unless it has weights.

        The revision of weights that were forgotten remains, for peers that do not know of it.
        """
        kept = self._kept.get(model)
        if kept is None or kept.current or kept.offered or model in self.names():
            return
        if (lock := self._locks.get(model)) is None or not lock.locked():
            with suppress(KeyError):
                metrics.TARGET_VERSION.remove(model)
            self._locks.pop(model, None)
            if not kept.state.revision:
                del self._kept[model]

    def all_kept(self) -> list[KeptWeights]:
        """Returns what is kept of each model that was ever pushed."""
        return [kept for kept in self._kept.values() if kept.state.revision]

    def lock(self, model: str) -> asyncio.Lock:
        """Returns the lock that guards changes of a model's kept weights."""
        return self._locks.setdefault(model, asyncio.Lock())

    def show(self, kept: KeptWeights) -> None:
        """Tells the fleet which weights of a model are current and which are offered."""
        self._fleet.aim(kept.model, _target(kept.current), _target(kept.offered))
        metrics.TARGET_VERSION.labels(kept.model).set(kept.target_version)

    def loaded(self, engine: Engine, header: engine_pb2.UpdateWeightsHeader) -> None:
        """Notes that an engine has loaded an update."""
        engine.policy_version, engine.push_id = header.policy_version, header.push_id
        self._fleet.changed(engine)


def _target(header: engine_pb2.UpdateWeightsHeader | None) -> Target | None:
    return None if header is None else Target(header.policy_version, header.push_id)


def _restored(data_dir: Path) -> list[KeptWeights]:
    check_folder(data_dir)
    found = [KeptWeights(data_dir, model) for model in kept_models(data_dir)]
    for kept in found:
        kept.restore()
    return found
