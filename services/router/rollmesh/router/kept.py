"""The weights that a router keeps on disk for engines that join later.

Each model has a folder:

    kept                         a `KeptWeights` message: the header of the weights that its engines
                                 must hold, the header of an offered push, and the headers of
                                 adapter revisions
    VERSION-PUSH_ID.safetensors  the weights, if they were pushed as bytes, or an adapter. If they
                                 are a difference, also each push that it builds on
    *.part                       a push that is being received

Headers name their files and are replaced by one rename, so version and bytes change together.
`offered` becomes `current` once an engine has loaded the weights. It stays while the outcome of a
push is unknown: an engine that registers with its push id has loaded it.
"""

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, TypeAlias

from google.protobuf.message import DecodeError

from rollmesh.internal.v1 import peers_pb2
from rollmesh.router.engines import Engine, Revision
from rollmesh.runtime import start_of
from rollmesh.runtime.errors import (
    InvalidFieldError,
    StoreError,
    StoreFullError,
    SupersededError,
)
from rollmesh.runtime.rpc import check_room
from rollmesh.v1 import engine_pb2, sampling_pb2

_KEPT, _PART, _FILE = "kept", ".part", ".safetensors"
_SLUG_CHARS = 48
_MOST_RUNS = 16
"""Number of runs of a policy whose requests are recognised when they are repeated."""
Header: TypeAlias = engine_pb2.UpdateWeightsHeader | engine_pb2.AdapterHeader
_PUSH_ID = re.compile(r"[0-9a-f]{32}")


class KeptWeights:
    """The kept weights of one model. All methods except `__init__` may block on the disk."""

    def __init__(
        self, data_dir: Path, model: str, state: peers_pb2.KeptWeights | None = None
    ) -> None:
        """Sets the folder and its state. Files that the state does not name are removed.

        Raises:
            OSError: A file cannot be removed.
        """
        slug = re.sub(r"[^A-Za-z0-9_-]", "_", model)[:_SLUG_CHARS]
        digest = hashlib.sha256(model.encode()).hexdigest()[:12]
        self.model = model
        self.folder = data_dir / "weights" / f"{slug}-{digest}"
        self.state = state or peers_pb2.KeptWeights(model=model)
        """The stored state. Never changed in place."""
        if state is not None:
            self._sweep()

    @property
    def current(self) -> engine_pb2.UpdateWeightsHeader | None:
        """Header of the last accepted weights."""
        return self.state.current if self.state.HasField("current") else None

    @property
    def offered(self) -> engine_pb2.UpdateWeightsHeader | None:
        """Header of a push whose outcome is not known yet."""
        return self.state.offered if self.state.HasField("offered") else None

    @property
    def offers(self) -> list[Header]:
        """Headers of the pushes whose outcome is not known yet: adapters, and the weights."""
        adapters: list[Header] = [one.header for one in self.state.adapters if not one.accepted]
        return adapters if self.offered is None else [*adapters, self.offered]

    @property
    def retained(self) -> list[sampling_pb2.AdapterRef]:
        """The adapter revisions that are accepted, by name and version."""
        return [one.header.adapter for one in self.state.adapters if one.accepted]

    @property
    def target_version(self) -> int:
        """Version that engines must hold. 0 until the first push is accepted."""
        return self.current.policy_version if self.current is not None else 0

    @property
    def last_version(self) -> int:
        """The version that the next push must exceed, and that no engine exceeds."""
        offered, replaced = self.state.offered.policy_version, self.state.replaced_version
        return max(self.target_version, offered, replaced, start_of(self.run("")) - 1)

    def run(self, adapter: str) -> sampling_pb2.PolicyRun:
        """Returns the current run of the model's weights, or of an adapter."""
        opened = [one.run for one in self.state.runs if one.run.adapter == adapter]
        return opened[-1] if opened else sampling_pb2.PolicyRun(model=self.model, adapter=adapter)

    def run_of_request(self, adapter: str, request_id: str) -> sampling_pb2.PolicyRun | None:
        """Returns the run that a request opened. None if it opened none."""
        wanted = adapter, request_id
        runs = (one for one in self.state.runs if (one.run.adapter, one.request_id) == wanted)
        return next((one.run for one in runs), None)

    def open_run(self, run: sampling_pb2.PolicyRun, request_id: str) -> None:
        """Stores a run, which is current from then on.

        Raises:
            StoreError: It could not be stored. The earlier run stays current.
        """
        mine = [one for one in self.state.runs if one.run.adapter == run.adapter]
        outlived = mine[: -_MOST_RUNS + 1]
        runs = [one for one in self.state.runs if one not in outlived]
        self.store(runs=[*runs, peers_pb2.OpenedRun(run=run, request_id=request_id)])

    def chain_to(
        self, header: engine_pb2.UpdateWeightsHeader
    ) -> list[engine_pb2.UpdateWeightsHeader]:
        """Returns the pushes that make up weights: whole ones, and then differences.

        Raises:
            SupersededError: The weights that it changes are not kept any more.
        """
        if not header.base_push_id:
            return [header]
        chain = [*self.state.bases, *([self.current] if self.current is not None else [])]
        for at, one in enumerate(chain):
            if one.push_id == header.base_push_id:
                return [*chain[: at + 1], header]
        raise SupersededError(
            f"policy_version {header.policy_version}: later weights replaced those that it changes"
        )

    def file_of(self, header: Header) -> Path | None:
        """Returns the file of a push, or None if it was not pushed as bytes."""
        match header:
            case engine_pb2.UpdateWeightsHeader() if not header.HasField("safetensors_bytes"):
                return None
        return self.folder / f"{_name(header)}{_FILE}"

    def file_of_push(self, push_id: str) -> Path | None:
        """Returns the file of a kept push, or None if there is none."""
        found = (one for one in _headers(self.state) if push_id and one.push_id == push_id)
        return next(map(self.file_of, found), None)

    def open_part(self, header: Header, claimed: int) -> IO[bytes]:
        """Opens the file for a push that is being received.

        Raises:
            StoreFullError: The disk has too little free space.
            StoreError: The folder cannot be written.
        """
        with typed_errors(self.folder):
            self._make_folder()
            check_room(self.folder, header.safetensors_bytes, claimed)
            return self._part(header).open("wb")

    def discard_part(self, header: Header) -> None:
        """Removes the partially received file of a push."""
        with suppress(OSError):
            self._part(header).unlink()

    def is_offered(self, header: Header) -> bool:
        """Returns whether a push is offered and not accepted yet."""
        return any(one.push_id == header.push_id for one in self.offers)

    def stored(self, header: Header, request_id: str) -> Header | None:
        """Returns the header of the kept push that a request repeats. None if it repeats none."""
        if not request_id:
            return None
        if isinstance(header, engine_pb2.AdapterHeader):
            kept = [one.header for one in self.adapters_of(header.adapter.name)]
            same = [one for one in kept if one.adapter.version == header.adapter.version]
            return next((one for one in same if one.request_id == request_id), None)
        last = self.offered or self.current
        if last is None or request_id != self.state.request_id:
            return None
        return last if last.policy_version == header.policy_version else None

    def offer(self, header: Header, request_id: str = "") -> None:
        """Stores a received push until it is accepted or withdrawn.

        Weights replace an earlier offer.

        Raises:
            StoreError: The push could not be stored. The earlier offer remains.
        """
        self.keep_part(header)
        if isinstance(header, engine_pb2.AdapterHeader):
            offered = peers_pb2.KeptAdapter(header=header)
            self.store(adapters=sorted([*self.state.adapters, offered], key=_order))
        else:
            replaced = max(self.state.offered.policy_version, self.state.replaced_version)
            self.store(offered=header, request_id=request_id, replaced_version=replaced)

    def accept(self, header: Header) -> None:
        """Makes offered weights current, or an offered adapter retained as by `with_adapter`.

        Raises:
            StoreError: The change could not be stored. The earlier weights stay current.
        """
        if isinstance(header, engine_pb2.AdapterHeader):
            self.store(adapters=self.with_adapter(header))
        else:
            self.store(current=header, offered=None, bases=self.chain_to(header)[:-1])

    def withdraw(self, header: Header) -> bool:
        """Drops an offer, which no engine has loaded. Returns whether there was one."""
        if not self.is_offered(header):
            return False
        if isinstance(header, engine_pb2.AdapterHeader):
            kept = self.state.adapters
            self.store(adapters=[one for one in kept if one.header.push_id != header.push_id])
        else:
            self.store(offered=None, request_id="")
        return True

    def adapters_of(self, name: str) -> list[peers_pb2.KeptAdapter]:
        """Returns the revisions of an adapter."""
        return [one for one in self.state.adapters if one.header.adapter.name == name]

    def with_adapter(self, header: engine_pb2.AdapterHeader) -> list[peers_pb2.KeptAdapter]:
        """Returns the adapters once a revision is accepted, without earlier offers of its name."""
        name, version = revision_of(header.adapter)
        after = [peers_pb2.KeptAdapter(header=header, accepted=True)]
        for one in self.state.adapters:
            own = one.header.adapter
            is_outlived = not one.accepted and own.name == name and own.version < version
            if one.header.push_id != header.push_id and not is_outlived:
                after.append(one)
        return sorted(after, key=_order)

    def is_behind(self, state: peers_pb2.KeptWeights) -> bool:
        """Returns whether the state of a peer is later."""
        return _position(state) > _position(self.state)

    def missing(self, state: peers_pb2.KeptWeights) -> list[Header]:
        """Returns the headers of a peer's state whose files are not here.

        Raises:
            InvalidFieldError: A push id is malformed, and would name a file elsewhere.
        """
        headers = _headers(state)
        for header in headers:
            if not _PUSH_ID.fullmatch(header.push_id):
                raise InvalidFieldError(
                    "push_id", f"{header.push_id!r:.80} is no push id of a router"
                )
        files = [(header, self.file_of(header)) for header in headers]
        return [header for header, file in files if file is not None and not file.exists()]

    def keep_part(self, header: Header) -> None:
        """Gives a completely received file its name."""
        file = self.file_of(header)
        if file is not None:
            with typed_errors(self.folder):
                self._part(header).replace(file)

    def adopt(self, state: peers_pb2.KeptWeights) -> None:
        """Stores a state, which may be a peer's and whose files are here.

        Raises:
            StoreError: It could not be stored. The earlier state remains.
        """
        with typed_errors(self.folder):
            self._make_folder()
            written = self.folder / f"{_KEPT}.new"
            with written.open("wb") as file:
                file.write(state.SerializeToString())
                sync(file)
            written.replace(self.folder / _KEPT)
            _sync_folder(self.folder)
            self.state = state
            self._sweep()

    def store(self, **changes: Any) -> None:
        """Stores a later state, with other values of some fields. None clears a field.

        Raises:
            StoreError: It could not be stored. The earlier state remains.
        """
        former = {field.name: value for field, value in self.state.ListFields()}
        former |= {"model": self.model, "revision": self.state.revision + 1}
        self.adopt(peers_pb2.KeptWeights(**{**former, **changes}))

    def _make_folder(self) -> None:
        if not self.folder.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            for parent in list(self.folder.parents)[:2]:
                _sync_folder(parent)

    def _part(self, header: Header) -> Path:
        return self.folder / f"{_name(header)}{_PART}"

    def _sweep(self) -> None:
        """Removes files that no header references, except pushes that are being received."""
        if not self.folder.exists():
            return
        named = {self.file_of(one) for one in _headers(self.state)}
        for path in self.folder.glob(f"*{_FILE}"):
            if path not in named:
                path.unlink(missing_ok=True)


def restored(data_dir: Path) -> list[KeptWeights]:
    """Returns the kept weights of earlier runs. Removes unfinished pushes.

    Raises:
        StoreError: The folder cannot be read or written.
    """
    found = []
    with typed_errors(data_dir):
        data_dir.mkdir(parents=True, exist_ok=True)
        probe = data_dir / f"probe-{os.getpid()}"
        with probe.open("wb") as file:
            file.write(b"rollmesh")
            sync(file)
        probe.unlink()
        _sync_folder(data_dir)
        for folder in (data_dir / "weights").glob("*/"):
            for part in folder.glob(f"*{_PART}"):
                part.unlink(missing_ok=True)
            if not (path := folder / _KEPT).exists():
                continue
            try:
                state = peers_pb2.KeptWeights.FromString(path.read_bytes())
            except DecodeError as error:
                problem = f"data_dir: {path} is damaged; remove its folder"
                raise StoreError(problem) from error
            found.append(KeptWeights(data_dir, state.model, state))
    return found


def sync(file: IO[bytes]) -> None:
    """Flushes a file to disk."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def typed_errors(folder: Path) -> Iterator[None]:
    """Raises OS errors inside the block as typed errors."""
    try:
        yield
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise StoreFullError(f"data_dir: the disk of {folder} is full; make room") from error
        raise StoreError(
            f"data_dir: {folder} cannot be used: {error.strerror or error}; "
            "give a folder that can be read and written"
        ) from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def revision_of(adapter: sampling_pb2.AdapterRef) -> Revision:
    """Returns the key of an adapter revision."""
    return adapter.name, adapter.version


def holds(engine: Engine, header: Header) -> bool:
    """Returns whether an engine has loaded a push."""
    if isinstance(header, engine_pb2.AdapterHeader):
        return engine.adapters.get(revision_of(header.adapter)) == header.push_id
    return (engine.policy_version, engine.push_id) == (header.policy_version, header.push_id)


def _order(adapter: peers_pb2.KeptAdapter) -> Revision:
    return revision_of(adapter.header.adapter)


def _headers(state: peers_pb2.KeptWeights) -> list[Header]:
    """Returns the headers of all that a state keeps."""
    weights = [getattr(state, one) for one in ("current", "offered") if state.HasField(one)]
    return [*state.bases, *weights, *(one.header for one in state.adapters)]


def _name(header: Header) -> str:
    version = (
        header.adapter.version
        if isinstance(header, engine_pb2.AdapterHeader)
        else header.policy_version
    )
    return f"{version}-{header.push_id}"


def _position(state: peers_pb2.KeptWeights) -> tuple[int, str, list[str], list[str]]:
    """Returns the sort key that orders two states by recency."""
    adapters = [one.header.push_id for one in state.adapters]
    runs = [f"{one.run.number} {one.request_id}" for one in state.runs]
    return state.revision, state.offered.push_id or state.current.push_id, adapters, runs
