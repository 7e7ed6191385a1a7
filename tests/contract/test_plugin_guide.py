"""The driver and the test in the plugin author's guide work as they stand there."""

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import ckptio

GUIDE = Path(__file__).parents[2] / "plugins" / "README.md"
_BLOCK = re.compile(r"<!-- the (\w+): .*? -->\n```python\n(.*?)```", re.DOTALL)


def _module(name: str) -> types.ModuleType:
    blocks = dict(_BLOCK.findall(GUIDE.read_text()))
    module = types.ModuleType(f"plugin_guide_{name}")
    # Importable, so that what it defines can be pickled.
    sys.modules[module.__name__] = module
    exec(compile(blocks[name], f"{GUIDE.name}:{name}", "exec"), module.__dict__)
    return module


driver = _module("driver")
TestGuide = _module("test").TestSQLite


@pytest.fixture(autouse=True)
def _registered():
    manager = ckptio.plugin_manager()
    manager.register(driver)
    yield
    manager.unregister(driver)


def test_the_guides_driver_is_short():
    block = dict(_BLOCK.findall(GUIDE.read_text()))["driver"]
    assert sum(bool(line.strip()) for line in block.splitlines()) <= 60


def test_the_guides_driver_holds_a_checkpoint(tmp_path):
    uri = f"sqlite://{tmp_path}/run.db"
    tree = {"w": np.arange(3_000_000, dtype=np.float32), "step": 7}
    ckptio.save(uri, tree)
    found = ckptio.restore(uri)
    assert found["step"] == 7
    np.testing.assert_array_equal(found["w"], tree["w"])
    with pytest.raises(ckptio.AlreadyExistsError):
        ckptio.save(uri, tree)
    ckptio.save(uri, {"w": 1}, overwrite=True)
    assert ckptio.restore(uri) == {"w": 1}
