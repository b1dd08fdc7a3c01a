"""Makes the demo's small policy in a folder, unless a model is there: `make_policy.py /model`."""

import logging
import shutil
import sys
import tempfile
from pathlib import Path

_CONFIG = "config.json"
_log = logging.getLogger("policy")


def main() -> None:
    """Takes the folder from the command line."""
    logging.basicConfig(level="INFO", format="%(message)s")
    target = Path(sys.argv[1])
    if (target / _CONFIG).exists():
        _log.info("%s already contains a model; it is kept", target)
        return
    # Imports torch, which takes longer than everything else where a model is there.
    from examples.demo.policy import make_policy

    with tempfile.TemporaryDirectory() as folder:
        report = make_policy(Path(folder), seed=0, progress=_show)
        made = sorted(Path(folder).iterdir(), key=lambda file: file.name == _CONFIG)
        # The config comes last: an interrupted run is repeated, and not taken for a model.
        for file in made:
            shutil.copyfile(file, target / file.name)
    _log.info("%d parameters in %.0f s", report.parameters, report.seconds)


def _show(step: int, steps: int, loss: float) -> None:
    if step % 100 == 0:
        _log.info("step %d of %d, loss %.3f", step, steps, loss)


if __name__ == "__main__":
    main()
