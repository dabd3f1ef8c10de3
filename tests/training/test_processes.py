"""Several processes as one training: the files in `processes/`, each in a pytest of its
own.

They fork, and a forked process waits forever for threads that only its parent had:
there must be none. The commands are in test_torchrun.py: tests of two files run side by
side.
"""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "processes"


def check(file):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--confcutdir",
            str(FOLDER),
            str(FOLDER / file),
        ],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def test_several_processes():
    check("cases.py")
