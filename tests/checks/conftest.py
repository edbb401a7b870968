"""Makes the shared table runner importable as `scenarios`: tests are no package."""

import importlib.util
import sys
from pathlib import Path

if "scenarios" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("scenarios", Path(__file__).with_name("scenarios.py"))
    assert _spec
    assert _spec.loader
    sys.modules["scenarios"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["scenarios"])
