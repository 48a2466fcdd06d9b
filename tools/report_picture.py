"""Run a search, kill and resume it, and save a picture of its report as docs/report.png. Needs Chromium.

python tools/report_picture.py
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "report.png"
SIZE = (1000, 2480)
_KILLED_AT = "runs/digits/1/trials/00015"
"""As soon as this trial has begun."""
_TRAINABLE = """
import math, random, time
from pathlib import Path
import prefect_tune as pt

class Net(pt.Trainable):
    def setup(self, config):
        self.config, self.at, self.draw = config, 0, random.Random(str(config))

    def step(self):
        time.sleep(0.3)
        self.at += 1
        far = abs(math.log10(self.config["lr"]) + 2) / 3 + self.config["dropout"] * 0.5
        noise = self.draw.uniform(0.9, 1.1)
        loss = 0.02 + 0.5 * far + (1.5 + far) * math.exp(-self.at / 5) * noise
        return {"loss": loss, "accuracy": math.exp(-loss), "eval": {"loss": loss * (1.1 + 0.01 * self.at)}}

    def save_checkpoint(self, checkpoint_dir):
        Path(checkpoint_dir, "at").write_text(str(self.at))
        Path(checkpoint_dir, "backbone").write_bytes(bytes(4_000_000))

    def load_checkpoint(self, checkpoint_dir):
        self.at = int(Path(checkpoint_dir, "at").read_text())
"""
_SEARCH = """
import prefect_tune as pt
pt.tune(
    "net:Net",
    {"lr": pt.loguniform(1e-4, 0.5), "dropout": pt.uniform(0, 0.5), "act": pt.choice(["relu", "gelu"])},
    target="runs", experiment="digits", metric="loss", num_samples=40, seed=7, scheduler=pt.ASHA(max_t=27),
    stop={"step": 27}, checkpoint=pt.Cadence(every_steps=3), max_concurrent_trials=4,
)
"""


def main() -> int:
    """Return the exit code."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("report_picture: there is no Chromium here (on Debian: apt-get install chromium)", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "net.py").write_text(_TRAINABLE)
        search = subprocess.Popen([sys.executable, "-c", _SEARCH], cwd=folder)
        while not Path(folder, _KILLED_AT).exists() and search.poll() is None:
            time.sleep(0.2)
        search.kill()
        search.wait()
        subprocess.run([sys.executable, "-c", _SEARCH], cwd=folder, check=True)
        report = [str(Path(sys.executable).with_name("prefect-tune")), "report", "runs", "digits", "-o", "page.html"]
        subprocess.run(report, cwd=folder, check=True)
        window = ["--headless=new", "--no-sandbox", "--hide-scrollbars", f"--window-size={SIZE[0]},{SIZE[1]}"]
        page = Path(folder, "page.html")
        page.write_text(page.read_text().replace(Path(folder).as_uri(), "s3://bucket"))
        subprocess.run([browser, *window, f"--screenshot={PICTURE}", page.as_uri()], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
