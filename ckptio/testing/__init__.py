"""For authors of drivers: the contract as a test suite, and a backend that fails on demand."""

from ckptio.testing.contract import BackendContract
from ckptio.testing.faulty import Call, FaultyBackend

__all__ = ["BackendContract", "Call", "FaultyBackend"]
