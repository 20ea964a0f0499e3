#!/usr/bin/env python3
"""Prints what CHANGELOG.md says of a version: notes.py CHANGELOG VERSION. A version without a heading is refused."""

import re
import sys
from pathlib import Path

changelog, version = Path(sys.argv[1]), sys.argv[2]
found = re.search(rf"^## \[?v?{re.escape(version)}(?![\w.+-])[^\n]*\n(.*?)(?=^## |\Z)", changelog.read_text(), re.S | re.M)
if not found:
    sys.exit(f"package: {changelog} has no heading for {version}: name its changes before the release")
print(found[1].strip())
