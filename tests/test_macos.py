"""Without what only Linux has, every module can be imported, and a search trains, saves and continues."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.fakes.macos.sitecustomize import MODULES, linux_only_names

_ROOT = Path(__file__).parents[1]
_PROGRAM = """
import gc, importlib, os, pkgutil, sys
gc.disable()  # a tenth of the time of the imports
import prefect_tune as pt

assert not hasattr(os, "pidfd_open") and not hasattr(os, "copy_file_range")


def import_all():
    '''Import every module whose third-party packages are installed; return their names.'''
    names = []
    for module in pkgutil.walk_packages(sys.modules["prefect_tune"].__path__, "prefect_tune."):
        try:
            importlib.import_module(module.name)
            names.append(module.name)
        except ImportError as error:
            if error.name.startswith("prefect_tune") or importlib.util.find_spec(error.name.partition(".")[0]):
                raise
    return names


before = import_all()  # what they import may look at the platform, and is there for Linux
for name in [name for name in sys.modules if name.partition(".")[0] == "prefect_tune"]:
    del sys.modules[name]
sys.platform = "darwin"
import prefect_tune as pt
after = import_all()
assert before == after and len(after) > 150, set(before) ^ set(after)

from prefect_tune.linux import uses_linux_calls
from prefect_tune.testing import without_server
assert not uses_linux_calls()
os.environ["PREFECT_TUNE_PORTABLE"] = "1"  # for the processes of the trials, which begin with another platform
folder = sys.argv[1]
with without_server():
    space = {"x": 0.0, "fails": "kill", "until": f"{folder}/killed"}
    results = pt.tune(
        "tests.trainables.moody:Moody", space, target=f"{folder}/target", experiment="e", metric="loss",
        num_samples=2, stop={"step": 3}, checkpoint=pt.Cadence(every_steps=1), max_concurrent_trials=1,
    )
    print(sorted((trial.attempt, trial.step, str(trial.status)) for trial in results.trials.values()))
"""


def test_every_module_is_imported_and_a_search_runs_where_nothing_is_that_only_linux_has(tmp_path: Path) -> None:
    path = os.pathsep.join(map(str, (_ROOT / "tests/fakes/macos", _ROOT)))
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.splitlines()[-1] == "[(1, 3, 'completed'), (2, 3, 'completed')]"


def test_one_module_and_the_fork_server_use_what_only_linux_has() -> None:
    names = {module: linux_only_names(module) for module in MODULES}
    paths = set()
    for path in (_ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Attribute(value=ast.Name(id=module), attr=name) if name in names.get(module, ()):
                    paths.add(path.name)
                case ast.ImportFrom(module=str(module), names=imported):
                    paths |= {path.name for alias in imported if alias.name in names.get(module, ())}
    # From Python 3.13 on macOS has `os.waitid`, too.
    assert paths == ({"linux.py"} if sys.version_info >= (3, 13) else {"linux.py", "fork_server.py"})
