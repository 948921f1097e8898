"""Makes a copy of the package in which the simulated roles are compiled by mypyc: for runs of very many seeds.

`python tests/paramserver/compiled.py FOLDER` takes some minutes and a C compiler. The sources stay the same, and so
does what happens: some seeds are traced with both, and a difference ends it.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENGINE = Path("cnnstrategies/paramserver")
PACKAGES = ("core", "coordinator", "server", "worker")
SIMULATOR = Path("tests/paramserver/simulation")
MODULES = ("messages", "effects", "slicing", "limits", "counters")
# mypyc cannot compile a class that is an exception; of another one all attributes are asked for at once.
INTERPRETED = ("core/view.py", "server/decision.py", "simulation/run.py")
# The last two restart a coordinator whose joiners have left, and leave the end of an epoch to the others.
COMPARED = [*range(500, 520), 110049, 600338]

SETUP = """
from mypyc.build import mypycify
from setuptools import setup

setup(name="compiled", packages=[], ext_modules=mypycify(["--config-file", "pyproject.toml", *{files}], opt_level="2"))
"""
TRACES = """
import sys
from simulation.run import PLANES

for seed in {seeds}:
    for simulate in PLANES.values():
        outcome = simulate(seed, traced=True)
        sys.stdout.write(repr((outcome.violation, outcome.events, [str(line) for line in outcome.trace])))
"""


def main() -> None:
    """Copy, compile, compare."""
    folder = Path(sys.argv[1]).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    for package in (Path("cnnstrategies"), SIMULATOR):
        shutil.copytree(ROOT / package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    engine = folder / ENGINE
    found = [path for package in PACKAGES for path in sorted((engine / package).glob("*.py"))]
    found += [engine / f"{module}.py" for module in MODULES]
    found += sorted((folder / SIMULATOR.name).rglob("*.py"))
    wanted = [path for path in found if path.name != "__init__.py" and "/".join(path.parts[-2:]) not in INTERPRETED]
    (folder / "setup.py").write_text(SETUP.format(files=[path.relative_to(folder).as_posix() for path in wanted]))
    print(f"compiling {len(wanted)} files, which takes some minutes", flush=True)
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}\nit needs a C compiler and setuptools")
    if traces(folder) != traces(ROOT, ROOT / SIMULATOR.parent):
        sys.exit(f"compiled, the seeds {COMPARED} have other traces")
    print(f"{folder}: the same traces in {len(COMPARED)} seeds")


def traces(*folders: Path) -> str:
    """What happens in some seeds with the packages in some folders."""
    text = TRACES.format(seeds=COMPARED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=folders[0], env=environment, capture_output=True, check=True
    )
    return hashlib.sha256(done.stdout).hexdigest()


if __name__ == "__main__":
    main()
