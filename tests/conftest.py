"""Before JAX is imported: eight virtual devices, as on a host with eight accelerators."""

import os

from hypothesis import settings

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

# How long an example takes says something of the machine alone; tests have deadlines of their own.
settings.register_profile("ckptio", deadline=None)
settings.load_profile("ckptio")
