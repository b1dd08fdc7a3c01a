"""The SDK without async: the same client, run on an event loop in a thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypeVar

from rollmesh.client import client as async_client
from rollmesh.client.rollout import RolloutSummary
from rollmesh.client.sessions import Session as AsyncSession
from rollmesh.client.weights import PushResult

_Result = TypeVar("_Result")


class _LoopThread:
    """An event loop that runs in a thread until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollmesh-client")
        self._thread.daemon = True
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C here ends the work there
            future.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


class Session:
    """An open session; see `rollmesh.client.Session`."""

    def __init__(self, inner: AsyncSession, thread: _LoopThread) -> None:
        """Made by `Client.session`."""
        self._inner = inner
        self._thread = thread
        self.id, self.key, self.api_key = inner.id, inner.key, inner.api_key

    @property
    def base_url(self) -> str:
        """The URL that an OpenAI SDK takes as `base_url`."""
        return self._inner.base_url

    def close(self, **options: Any) -> tuple[str, ...]:
        """Closes the session; takes what `rollmesh.client.Session.close` takes."""
        return self._thread.run(self._inner.close(**options))


class Client(AbstractContextManager["Client"]):
    """The client for programs without an event loop; see `rollmesh.client.Client`.

    The arguments of every method are those of the async one. Thread-safe.
    """

    def __init__(self, **options: Any) -> None:
        """Takes what `rollmesh.client.Client` takes, and starts the thread."""
        self._inner = async_client.Client(**options)
        self._thread = _LoopThread()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes the connections and ends the thread."""
        self.close()

    def close(self) -> None:
        """Closes the connections and ends the thread."""
        self._thread.run(self._inner.aclose())
        self._thread.close()

    def open_session(self, **options: Any) -> Session:
        """Opens a session that the caller closes."""
        return Session(self._thread.run(self._inner.open_session(**options)), self._thread)

    @contextmanager
    def session(self, **options: Any) -> Iterator[Session]:
        """Holds a session open during the block, and closes it as the async one does."""
        with self._entered(self._inner.session(**options)) as inner:
            yield Session(inner, self._thread)

    def rollout(self, prompts: Any, **options: Any) -> RolloutSummary:
        """Plays every prompt n times."""
        return self._thread.run(self._inner.rollout(prompts, **options))

    def push_weights(self, tensors: Any, policy_version: int, **options: Any) -> PushResult:
        """Gives all engines new weights, streamed from this process."""
        return self._thread.run(self._inner.push_weights(tensors, policy_version, **options))

    def push_checkpoint(
        self, checkpoint_dir: Any, policy_version: int, **options: Any
    ) -> PushResult:
        """Gives all engines new weights from a directory that each of them can read."""
        work = self._inner.push_checkpoint(checkpoint_dir, policy_version, **options)
        return self._thread.run(work)

    @contextmanager
    def _entered(self, scope: AbstractAsyncContextManager[_Result]) -> Iterator[_Result]:
        value = self._thread.run(_await(scope.__aenter__()))
        try:
            yield value
        except BaseException as error:
            leave = scope.__aexit__(type(error), error, error.__traceback__)
            if not self._thread.run(_await(leave)):
                raise
        else:
            self._thread.run(_await(scope.__aexit__(None, None, None)))


async def _await(work: Any) -> Any:
    return await work
