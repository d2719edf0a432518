"""`make bench`: the fast benchmarks, one after the other."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

for command in (["speed.py", "--counts"], ["speed.py", "--fast"]):
    print(f"--- {' '.join(command)}", flush=True)
    subprocess.run([sys.executable, str(HERE / command[0]), *command[1:]], check=True)
