"""Makes the shared worlds importable as `worlds`: tests are no package."""

import importlib.util
import sys
from pathlib import Path

if "worlds" not in sys.modules:
    _spec = importlib.util.spec_from_file_location("worlds", Path(__file__).with_name("worlds.py"))
    assert _spec
    assert _spec.loader
    sys.modules["worlds"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["worlds"])
