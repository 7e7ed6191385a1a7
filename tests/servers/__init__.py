"""Real storage servers on loopback, one module each, for the tests that are about a store."""
