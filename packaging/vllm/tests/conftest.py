"""The tests need no vLLM and no torch: a scripted engine reports layers, and tests/clients/kv_reader.py reads the frames."""

import sys
from pathlib import Path

PACKAGE = Path(__file__).parent.parent
sys.path[:0] = [str(PACKAGE), str(PACKAGE.parent.parent / "tests" / "clients")]
