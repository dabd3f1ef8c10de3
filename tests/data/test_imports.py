"""What needs what: sources need no torch, loaders need neither pillow nor rich nor
typer.
"""

import subprocess
import sys

import pytest

SOURCES = """
import numpy, rfdlc
data = rfdlc.load("digits-lt").hold_out()
rfdlc.load((numpy.eye(4), [0, 0, 1, 1]))
"""
BAR = """
import sys
class Barred:
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in {barred}:
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Barred)
"""
LOADERS = """
import numpy, rfdlc
from rfdlc.data.augment import Augment
from rfdlc.data.loader import ResidentLoader
from rfdlc.data.streamed import StreamedLoader
images = numpy.zeros((8, 3, 8, 8), dtype=numpy.uint8)
data = rfdlc.load({"train": (images, [0, 1] * 4)}, test_fraction=0)
next(ResidentLoader(data.train, data.normalisation, augment=Augment.paper()).epoch(0))
"""
TABLES = """
import tempfile, rfdlc.cli.data, rfdlc.cli.train
with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
    file.write("age,town,kind\\n" + "30,Oslo,a\\n,,b\\n7,Lima,a\\n41,Lima,b\\n" * 5)
    file.flush()
    rfdlc.cli.data.inspect(source=file.name, target="kind")
    try:
        rfdlc.cli.train.train(source=file.name, target="kin")
    except rfdlc.errors.InputError as error:
        assert "did you mean 'kind'" in str(error)
"""


@pytest.mark.parametrize(
    ("code", "barred"),
    [
        (SOURCES, "torch PIL pandas pyarrow matplotlib typer"),
        (TABLES, "torch sklearn scipy pandas matplotlib PIL"),
        (LOADERS, "PIL rich typer sklearn pandas matplotlib"),
    ],
)
def test_nothing_more_is_imported(code: str, barred: str) -> None:
    script = BAR.format(barred=barred.split()) + code
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )


def test_a_missing_torch_is_named_with_what_to_install() -> None:
    script = BAR.format(barred=["torch"]) + "import rfdlc\nrfdlc.train"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    last = done.stderr.strip().splitlines()[-1]
    assert (
        last
        == 'ModuleNotFoundError: rfdlc.train needs torch: pip install "rfdlc[train]"'
    )
