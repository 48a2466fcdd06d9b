"""All figures of `benchmarks/README.md`: `python -m benchmarks` measures them and writes them there."""

import subprocess
import sys

for name in (
    "traffic",
    "transfer",
    "memory",
    "search",
    "quality.schedulers",
    "scale",
    "long_search",
    "audits",
    "processes",
    "visible",
    "trial_cost",
    "peers.import_cost",
):
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}", "--write"], check=True)
