import os

from tests.ray_on_busy_machines import PATIENT

# Ray's processes inherit these. Without a mode, Ray takes the token that a machine may have.
os.environ.update(PATIENT, RAY_AUTH_MODE="disabled")
