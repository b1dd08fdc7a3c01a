"""Engines that gateways report for an answer that cannot be right.

A gateway may be wrong itself, so what one gateway reports takes the engine from that gateway alone.
An engine that two report, or the only gateway, is out of service for all. Both last until the
engine registers again; a gateway that leaves takes its reports along.
"""

from rollmesh.router.leasing.engines import Engine
from rollmesh.router.leasing.fleet import Fleet
from rollmesh.router.leasing.streams import Stream, Streams
from rollmesh.router.leasing.waits import Waits

_REPORTERS = 2


class Distrust:
    """Which gateways distrust which engines.

    Invariant: the `distrusted` of a stream are the engines with a report of its gateway.
    """

    def __init__(self, streams: Streams, fleet: Fleet, waits: Waits) -> None:
        """Takes the streams, the engines, and the requests that wait for one."""
        self._streams = streams
        self._fleet = fleet
        self._waits = waits

    def report(self, stream: Stream, engine: Engine, fault: str) -> None:
        """Takes a gateway's report of an engine.

        Args:
            stream: A stream of the gateway.
            engine: The engine.
            fault: Its answer and why that cannot be right, for people.
        """
        engine.reports.setdefault(stream.hello.gateway_id, fault)
        if len(engine.reports) >= min(_REPORTERS, len(self._streams.gateways)):
            engine.fault = engine.fault or fault
            self._fleet.changed(engine)
        for one in self._of(stream.hello.gateway_id):
            self._show(one, one.distrusted | {engine})

    def opened(self, stream: Stream) -> None:
        """Applies the reports of a gateway to another stream of it."""
        for one in self._of(stream.hello.gateway_id):
            if one is not stream:
                stream.distrusted = one.distrusted
                return

    def closed(self, stream: Stream) -> None:
        """Drops the reports of a gateway whose last stream has closed."""
        if self._of(stream.hello.gateway_id):
            return
        for engine in stream.distrusted:
            engine.reports.pop(stream.hello.gateway_id, None)

    def moved(self, former: Engine, engine: Engine) -> None:
        """Moves the reports of an engine that was awaited to the one that has registered."""
        engine.fault, engine.reports = former.fault, former.reports
        for stream in self._streams.values():
            if former in stream.distrusted:
                self._show(stream, stream.distrusted - {former} | {engine})

    def gone(self, engine: Engine) -> None:
        """Forgets the reports of an engine that is gone."""
        for gateway_id in engine.reports:
            for stream in self._of(gateway_id):
                self._show(stream, stream.distrusted - {engine})

    def _of(self, gateway_id: str) -> list[Stream]:
        return [self._streams[one] for one in self._streams.of_gateway(gateway_id)]

    def _show(self, stream: Stream, distrusted: frozenset[Engine]) -> None:
        if distrusted != stream.distrusted:
            stream.distrusted = distrusted
            self._waits.trust_changed(stream)
