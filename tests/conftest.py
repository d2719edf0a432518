"""Lets tests import `common` from here, whatever folder they are in."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
