"""Before JAX is imported: eight virtual devices, as on a host with eight accelerators."""

import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
