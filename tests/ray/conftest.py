import os

from tests.ray_on_busy_machines import PATIENT

os.environ.update(PATIENT)  # Ray's processes inherit them
