"""What leases cost, and what the router's policies do to groups of sessions.

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
from rollmesh.router.leasing.policies import POLICIES


def main() -> None:
    """Runs everything and prints what was measured."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.router")
    parser.add_argument("--days", type=float, default=7, help="simulated days for each policy")
    options = parser.parse_args()
    result: dict[str, float] = lease_costs()
    result["lease_grpc_cpu_us"] = asyncio.run(lease_us())
    result["rss_mb_100k_sessions"] = rss_mb()
    for policy in POLICIES:
        started = time.process_time()
        week = Week(policy, options.days)
        for key, value in week.run().items():
            result[f"{key}_{policy}"] = value
        waits = sorted(week.waits_s)
        print(
            f"{policy}: {week.turns} turns, {time.process_time() - started:.0f} s of CPU; "
            f"waited for a slot: {sum(one > 0 for one in waits) / len(waits):.1%}, "
            f"longest {waits[-1]:.1f} s"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
