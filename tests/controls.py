"""Requests of control calls, for routers and engines."""

from typing import Any, TypeAlias

from rollmesh.v1 import engine_pb2, sampling_pb2

Control: TypeAlias = engine_pb2.ControlEnginesRequest
KEEP, ABORT, WAIT = (
    engine_pb2.PAUSE_MODE_KEEP,
    engine_pb2.PAUSE_MODE_ABORT,
    engine_pb2.PAUSE_MODE_WAIT,
)
RESUME = Control(resume=Control.Resume())
WAKE_UP = Control(wake_up=Control.WakeUp())
RESET_PREFIX_CACHE = Control(reset_prefix_cache=Control.ResetPrefixCache())
ABORT_ALL = Control(abort=Control.Abort(all=True))


def pause(mode: engine_pb2.PauseMode.ValueType = KEEP, **given: Any) -> Control:
    return Control(pause=Control.Pause(mode=mode), **given)


def sleep(level: int | None = None, **given: Any) -> Control:
    return Control(sleep=Control.Sleep(level=level), **given)


def unload_adapter(name: str, version: int = 0, **given: Any) -> Control:
    adapter = sampling_pb2.AdapterRef(name=name, version=version)
    return Control(unload_adapter=Control.UnloadAdapter(adapter=adapter), **given)


def abort(*request_ids: str, **given: Any) -> Control:
    return Control(abort=Control.Abort(request_ids=request_ids), **given)
