"""What leases cost, and what the imbalance margin does to groups of sessions.

    make bench-router

The last line of the output is one JSON object.
"""

import argparse
import asyncio
import json
import time

from benchmarks.router.costs import lease_costs, rss_mb
from benchmarks.router.simulation import Week
from benchmarks.router.wire import lease_us

_MARGINS = (0, 8, 1_000)
"""Sessions above the mean at which an engine counts as overloaded. 1,000 balances nothing."""


def main() -> None:
    """Runs everything and prints what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router")
    parser.add_argument("--days", type=float, default=7, help="simulated days for each margin")
    options = parser.parse_args()
    result: dict[str, float] = lease_costs()
    result["lease_grpc_cpu_us"] = asyncio.run(lease_us())
    result["rss_mb_100k_sessions"] = rss_mb()
    for margin in _MARGINS:
        started = time.process_time()
        week = Week(margin, options.days)
        for key, value in week.run().items():
            result[f"{key}_margin_{margin}"] = value
        waits = sorted(week.waits_s)
        print(
            f"margin {margin}: {week.turns} turns, {time.process_time() - started:.0f} s of CPU; "
            f"waited for a slot: {sum(one > 0 for one in waits) / len(waits):.1%}, "
            f"longest {waits[-1]:.1f} s"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
