"""Prometheus' rules of alarms, in a real Prometheus beside a mesh. Skipped without one.

`apt-get install prometheus` brings it, and promtool.
"""

import asyncio
import shutil
import subprocess
from asyncio.subprocess import DEVNULL
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rollmesh.runtime import ALARM_RULES
from scripts.pages.alarms import PROMETHEUS
from tests.meshes import scripted_mesh
from tests.processes import reserved_port
from tests.waiting import until

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="prometheus is not installed: apt-get install prometheus",
)
SERVICES = ("router", "engine", "collector", "gateway", "second")
SERIES = [
    # Metric, its samples once a minute, and the alarm after half an hour.
    ("rollmesh_router_queue_length", "0+1x40", "RollmeshQueueGrows"),
    ("rollmesh_router_queue_length", "5x40", ""),
    ("rollmesh_gateway_dead_letters", "1x40", "RollmeshDeadLetters"),
    ("rollmesh_router_open_circuits", "0x40", ""),
    ('rollmesh_gateway_turns_total{end="length"}', "0+9x40", "RollmeshAlwaysByLength"),
    ('rollmesh_gateway_turns_total{end="stop"}', "0+9x40", ""),
    ("rollmesh_gateway_not_finite_logprobs_total", "0+1x40", "RollmeshLogprobsNotFinite"),
    ('rollmesh_alarm{name="no_variance",where="trainer"}', "1x40", "RollmeshNoVariance"),
    ('up{job="rollmesh"}', "0x40", "RollmeshServerSilent"),
]  # fmt: skip


def test_the_rules_are_raised_by_their_series(tmp_path: Path) -> None:
    names = sorted({name for _, _, name in SERIES if name})
    tests = [
        "  - interval: 1m\n    input_series:\n"
        f"      - {{series: '{series}', values: '{values}'}}\n    alert_rule_test:\n"
        + "".join(
            f"      - {{alertname: {one}, eval_time: 30m, exp_alerts: [__FOUND__]}}\n"
            for one in ([name] if name else names)
        )
        for series, values, name in SERIES
    ]
    # promtool wants each annotation. That an alarm is raised at all is seen by its complaint.
    for text, (series, _, name) in zip(tests, SERIES, strict=True):
        path = tmp_path / "test.yml"
        whole = text.replace("__FOUND__", "")
        path.write_text(f"rule_files: ['{PROMETHEUS}']\ntests:\n{whole}")
        done = subprocess.run(
            ["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False
        )
        said = done.stdout + done.stderr
        assert (done.returncode != 0) == bool(name), (series, said)
        assert not name or f'alertname="{name}"' in said, said


async def test_prometheus_evaluates_each_rule_with_the_metrics_of_a_mesh(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    first = {service: {"metrics_port": 0} for service in SERVICES}
    async with scripted_mesh(tmp_path, tokenizer_dir, first=first, metrics_port=0) as mesh:
        flags: dict[str, Any] = {**mesh.flags("engine"), "port": 0, "metrics_port": 0}
        await mesh.run("engine", "second", **flags, engine_id="second")
        targets = [f"'127.0.0.1:{mesh.processes[one].metrics_port}'" for one in SERVICES]
        rules = tmp_path / "alarms.yml"
        rules.write_text(PROMETHEUS.read_text().replace("for: 1m", "for: 0s"))
        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 300ms, evaluation_interval: 300ms}\n"
            f"rule_files: ['{rules}']\n"
            "scrape_configs:\n  - job_name: rollmesh\n    static_configs:\n"
            f"      - targets: [{', '.join(targets)}]\n"
        )
        with reserved_port() as holder:
            address = f"127.0.0.1:{holder.getsockname()[1]}"
        process = await asyncio.create_subprocess_exec(
            "prometheus", f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'tsdb'}", f"--web.listen-address={address}",
            stdout=DEVNULL, stderr=DEVNULL,
        )  # fmt: skip
        try:
            async with httpx2.AsyncClient(base_url=f"http://{address}/api/v1") as http:

                async def found() -> list[dict[str, Any]]:
                    try:
                        answer = (await http.get("/rules")).json()
                    except (httpx2.HTTPError, ValueError):
                        return []
                    listed = [one for group in answer["data"]["groups"] for one in group["rules"]]
                    return listed if all(one["health"] != "unknown" for one in listed) else []

                async def firing() -> set[str]:
                    return {one["name"] for one in await found() if one["state"] == "firing"}

                async with mesh.client() as client:
                    for at in range(4):
                        async with client.session() as session:
                            await mesh.openai(session).chat.completions.create(
                                model="policy", messages=[{"role": "user", "content": f"{at}"}]
                            )
                    async with client.subscribe("trainer", unit="session"):
                        await client.state_dict("trainer")
                        assert len(await until(found)) == len(ALARM_RULES)
                        assert await firing() == set()
                        await client.report_step("trainer", 1, {"loss": float("nan")})
                        assert await until(firing) == {"RollmeshNotFinite"}
                        await mesh.processes["second"].kill()

                        async def both() -> bool:
                            return await firing() >= {"RollmeshNotFinite", "RollmeshServerSilent"}

                        await until(both)
                assert {one["health"] for one in await found()} == {"ok"}
        finally:
            process.kill()
            await process.wait()
