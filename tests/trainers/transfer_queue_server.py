"""A real TransferQueue. Runs in the trainers' environment."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import ray
import transfer_queue as tq
from omegaconf import OmegaConf

from tests.ray_on_busy_machines import started


@contextmanager
def running_queue() -> Iterator[None]:
    """Starts Ray and the queue, with places for the actors beyond the machine's cores."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as short:
        started(
            ray.init,
            address="local",  # not one that runs on this machine already
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=80_000_000,
            _temp_dir=short,  # the paths of its sockets may have 107 characters
        )
        one_unit = {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}
        tq.init(OmegaConf.create(one_unit))
        try:
            yield
        finally:
            tq.close()
            ray.shutdown()
