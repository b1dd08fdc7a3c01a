"""A small kubelet: starts the containers of a pod on this machine as its manifest says.

A container has a file system of its own that cannot be written, with its volumes where they are
mounted. The user, groups and rights of its manifest. Process ids, a host name and a network of its
own. Instead of images it has this machine's programs, our code and the tests' environment, which
stand for `/venv` and `/app`. Entry points and environments are those of the Dockerfiles.
"""

import asyncio
import os
import re
import shlex
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.kubernetes.images import image
from tests.kubernetes.network import Network
from tests.kubernetes.rendering import Manifest
from tests.kubernetes.volumes import make_volume
from tests.paths import ROOT
from tests.waiting import until, within

_PROGRAMS = ("/usr", "/lib", "/lib64", "/bin", "/sbin")
_ETC = "passwd group nsswitch.conf ld.so.cache localtime"
_FOUND_IN = (sys.base_prefix, *sys.path, str(ROOT))
_PYTHON = sorted({str(Path(one).resolve()) for one in _FOUND_IN})
_SETUP = """
set -e
mount --make-rprivate /
mount -t tmpfs -o mode=0755,size=64m pod {root}
take() {{
  mkdir -p {root}"$2"
  mount --bind "$1" {root}"$2"
  if [ "$3" = ro ]; then mount -o remount,bind,ro {root}"$2"; fi
}}
{volumes}
{programs}
mkdir -p {root}/dev {root}/proc {root}/etc
for file in {etc}; do
  if [ -e /etc/$file ]; then cp -L /etc/$file {root}/etc; fi
done
touch {root}/etc/hosts {root}/etc/resolv.conf
for device in null zero random urandom; do
  touch {root}/dev/$device; mount --bind /dev/$device {root}/dev/$device
done
mount --bind {hosts} {root}/etc/hosts
mount --bind {resolver} {root}/etc/resolv.conf
mount -t proc proc {root}/proc
mount -o remount,ro {root}
hostname {name}
exec chroot {root} {command}
"""
_ESTABLISHED, _FIRST_OWN = "01", 32_768
_START_S, _STOP_SLACK_S, _PAUSE_S = 120.0, 30.0, 0.3


@dataclass
class Pod:
    """A pod."""

    name: str
    spec: Manifest
    labels: dict[str, str]
    folder: Path
    mounts: dict[str, Path]
    """Folders of its volumes, by the volumes' names."""
    network: Network
    secrets: dict[tuple[str, str], str]
    """Values of Secrets that its environment takes, by Secret and key."""
    address: str = ""
    restarts: int = 0
    ready: bool = False
    """Whether its probes have succeeded, and it is not being stopped."""
    late: bool = False
    """Whether it was killed because it did not end in its grace period."""
    _place: str = ""
    _process: Process | None = None
    _watching: asyncio.Task[None] | None = None
    _ending: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def container(self) -> Manifest:
        (only,) = self.spec["containers"]
        found: Manifest = only
        return found

    @property
    def log(self) -> Path:
        return self.folder / "log"

    async def start(self) -> None:
        """Gives it an address, runs its first containers to their end, and starts the last."""
        self._place, self.address = await asyncio.to_thread(self.network.add)
        self._watching = asyncio.create_task(self._run())

    async def until_ready(self) -> None:
        """Waits until its probes succeed."""
        probe = self.container.get("startupProbe")

        async def serves() -> bool:
            if self._process is None or probe is None:
                return self._process is not None
            self.ready = await self.execute(probe["exec"]["command"]) == 0
            if not self.ready:
                await asyncio.sleep(_PAUSE_S)
            return self.ready

        async with within(_START_S, lambda: f"{self.name}:\n{self.log.read_text()[-3000:]}"):
            await until(serves, _START_S)
        self.ready = True

    async def probed(self, kind: str) -> bool:
        """Asks one of its probes once. Returns whether it succeeds."""
        return await self.execute(self.container[kind]["exec"]["command"]) == 0

    async def execute(self, command: Sequence[str]) -> int:
        """Runs a command in its container. Returns its exit code."""
        if (first := self._first()) is None:
            return -1
        pid = first.pid
        enter = ("nsenter", "--target", str(pid), "--mount", "--net", "--uts", "--pid")
        process = await asyncio.create_subprocess_exec(
            *(*enter, f"--root=/proc/{pid}/root", *self._as_user(self.container, command)),
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
        )
        _, said = await process.communicate()
        if process.returncode:
            with self.log.open("ab") as log:
                log.write(b"probe: " + said)
        return process.returncode or 0

    def connections(self) -> set[tuple[str, int]]:
        """Where it has connected to: addresses and ports of others that it has called."""
        first = self._first()
        if first is None:
            return set()
        lines: list[str] = []
        for version in ("tcp", "tcp6"):
            with suppress(OSError):
                lines += Path(f"/proc/{first.pid}/net/{version}").read_text().splitlines()[1:]
        return {end for line in lines if (end := _called(line)) is not None}

    async def stop(self) -> None:
        """Stops it as a kubelet does: the hook, SIGTERM, and SIGKILL after its grace period."""
        self.ready = False
        grace_s = self.spec["terminationGracePeriodSeconds"]
        hook = self.container.get("lifecycle", {}).get("preStop")
        try:
            async with asyncio.timeout(grace_s):
                if hook is not None:
                    await self.execute(hook["exec"]["command"])
                self._ending.set()
                self._signal(signal.SIGTERM)
                if self._watching is not None:
                    await asyncio.shield(self._watching)
        except TimeoutError:
            self.late = True
        await self.end()

    async def lose(self) -> None:
        """Its node is gone: nobody hears of it again."""
        self.network.cut(self._place)
        await self.end()

    async def end(self) -> None:
        """Kills whatever runs of it."""
        self.ready = False
        self._ending.set()
        if self._process is not None and self._process.returncode is None:
            self._signal(signal.SIGKILL)
            with suppress(ProcessLookupError):
                self._process.kill()
        if self._watching is not None:
            async with asyncio.timeout(_STOP_SLACK_S):
                await asyncio.gather(self._watching, return_exceptions=True)
        await asyncio.to_thread(self.network.remove, self._place)

    async def close_input(self) -> None:
        """Ends the standard input of its container, and waits until it has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._watching is not None
        self._ending.set()
        self._process.stdin.close()
        await self._watching

    async def _run(self) -> None:
        """Runs the containers. One that ends by itself is started again."""
        for one in self.spec.get("initContainers", []):
            await self._repeat(one, until_done=True)
        await self._repeat(self.container, until_done=False)

    async def _repeat(self, container: Manifest, *, until_done: bool) -> None:
        """Starts a container until the pod ends, or until the container has done its work."""
        while not self._ending.is_set():
            code = await self._contain(container)
            if self._ending.is_set() or (until_done and code == 0):
                return
            self.restarts += 1
            with self.log.open("a") as log:
                log.write(f"{container['name']} ended with {code}\n")
            await asyncio.sleep(_PAUSE_S)

    async def _contain(self, container: Manifest) -> int:
        script = self._script(container)
        place = ("setpriv", "--pdeathsig=KILL", "ip", "netns", "exec", self._place)
        alone = ("unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child")
        with self.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(*place, *alone, "sh", "-c", script),
                stdin=PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._process = process
        return await process.wait()

    def _first(self) -> psutil.Process | None:
        """The first process of the container, as this machine sees it. None if it has none."""
        with suppress(psutil.NoSuchProcess):
            if self._process is not None:
                return next(iter(psutil.Process(self._process.pid).children()), None)
        return None

    def _signal(self, number: signal.Signals) -> None:
        with suppress(psutil.NoSuchProcess):
            if (first := self._first()) is not None:
                first.send_signal(number)

    def _script(self, container: Manifest) -> str:
        root = self.folder / "root"
        root.mkdir(exist_ok=True)
        resolver = self.folder / "resolv.conf"
        resolver.touch()
        volumes = [
            f"take {self.mounts[one['name']]} {one['mountPath']} "
            f"{'ro' if one.get('readOnly') else 'rw'}"
            for one in container.get("volumeMounts", [])
        ]
        programs = [
            f"take {path} {path} ro" for path in (*_PROGRAMS, *_PYTHON) if Path(path).is_dir()
        ]
        programs.append(f"take {ROOT / '.venv'} /venv ro")
        known = image(container["image"])
        start = [*container.get("command", known.entrypoint), *container.get("args", [])]
        return _SETUP.format(
            root=root,
            volumes="\n".join(volumes),
            programs="\n".join(programs),
            etc=_ETC,
            hosts=self.network.hosts_file,
            resolver=resolver,
            name=self.name,
            command=shlex.join(self._as_user(container, start)),
        )

    def _as_user(self, container: Manifest, command: Sequence[str]) -> list[str]:
        of_pod = self.spec["securityContext"]
        user = (f"--reuid={of_pod['runAsUser']}", f"--regid={of_pod['runAsGroup']}")
        rights = ("--pdeathsig=KILL", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all")
        groups = (f"--groups={of_pod['fsGroup']}", *rights)
        variables = self._variables(container)
        expanded = [_expanded(word, variables) for word in command]
        pairs = [f"{name}={value}" for name, value in variables.items()]
        return ["setpriv", *user, *groups, "env", "-i", *pairs, *expanded]

    def _variables(self, container: Manifest) -> dict[str, str]:
        found = {**image(container["image"]).environment, "HOME": "/home/rollmesh"}
        found["PATH"] = found["PATH"].replace("$PATH", os.environ["PATH"])
        fields = {"metadata.name": self.name, "status.podIP": self.address}
        for one in container.get("env", []):
            given = one.get("valueFrom", {})
            if "secretKeyRef" in given:
                reference = given["secretKeyRef"]
                found[one["name"]] = self.secrets[reference["name"], reference["key"]]
            elif "fieldRef" in given:
                found[one["name"]] = fields[given["fieldRef"]["fieldPath"]]
            else:
                found[one["name"]] = _expanded(one["value"], found)
        return found


def make_pod(
    name: str,
    template: Manifest,
    objects: list[Manifest],
    network: Network,
    folder: Path,
    *,
    claims: Path,
    secrets: dict[tuple[str, str], str],
) -> Pod:
    """Makes a pod and its volumes. Nothing runs yet.

    Args:
        name: Its name.
        template: Its labels and its spec.
        objects: Where ConfigMaps and Secrets are.
        network: Where it gets its address.
        folder: For what belongs to it alone.
        claims: Has a folder for each claim.
        secrets: Values of further Secrets, by name and key.
    """
    spec = template["spec"]
    folder.mkdir()
    group = spec["securityContext"]["fsGroup"]
    mounts = {
        one["name"]: make_volume(one, folder, group, objects, claims) for one in spec["volumes"]
    }
    labels = template["metadata"]["labels"]
    return Pod(name, spec, labels, folder, mounts, network, secrets)


def _expanded(word: str, variables: dict[str, str]) -> str:
    """Replaces `$(NAME)`, as a kubelet does."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), word)


def _called(line: str) -> tuple[str, int] | None:
    """Returns the other end of a connection in a line of /proc/net/tcp, if this end opened it."""
    _, local, remote, state, *_ = line.split()
    address, _, port = remote.partition(":")
    own = int(local.rpartition(":")[2], 16)
    if state != _ESTABLISHED or own < _FIRST_OWN or int(port, 16) >= _FIRST_OWN:
        return None
    last_four = address[-8:]  # the bytes of an IPv4 address, the last one first
    parts = [str(int(last_four[at : at + 2], 16)) for at in (6, 4, 2, 0)]
    return ".".join(parts), int(port, 16)
