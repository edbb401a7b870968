"""Makes the shared generator of runs importable as `runs` and `injections`: tests are no package."""

import importlib.util
import sys
from pathlib import Path

for _name in ("runs", "injections"):
    if _name not in sys.modules:
        _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
        assert _spec
        assert _spec.loader
        sys.modules[_name] = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[_name])
