"""Kernels are used where they can be compiled, and missed elsewhere."""

import sys
import warnings
from types import SimpleNamespace

import pytest
import torch

from rfdlc.data import kernels
from rfdlc.training.config import TrainConfig
from rfdlc.training.step import reduced


@pytest.fixture
def machine(monkeypatch):
    """What `load_kernels` finds on a machine with such a GPU and such a Triton."""

    def found(capability, target, version="3.10.0"):
        driver = SimpleNamespace(active=SimpleNamespace(get_current_target=target))
        triton = SimpleNamespace(
            runtime=SimpleNamespace(driver=driver), __version__=version
        )
        monkeypatch.setitem(sys.modules, "triton", triton)
        monkeypatch.setattr(kernels, "find_spec", lambda name: object())
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        return kernels.load_kernels.__wrapped__("json")

    return found


def test_kernels_are_loaded_where_triton_compiles(machine):
    assert machine((9, 0), lambda: "cuda:90") is sys.modules["json"]


def test_without_a_compiler_training_goes_on_and_says_so(machine):
    def target():
        raise RuntimeError("Failed to find C compiler")

    with pytest.warns(
        RuntimeWarning,
        match=(
            r"C compiler\): training goes on without them, slower; install a C compiler"
        ),
    ):
        assert machine((8, 0), target) is None


def test_an_old_triton_is_named(machine):
    with pytest.warns(
        RuntimeWarning,
        match=r"Triton 3\.3\.1 is too old for kernels.* take torch 2\.8 or later",
    ):
        assert machine((9, 0), lambda: "cuda:90", "3.3.1") is None
    assert machine((9, 0), lambda: "cuda:90", "3.4.0+git1234") is sys.modules["json"]


def test_older_gpus_and_machines_without_triton_have_none(machine, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert machine((7, 5), lambda: "cuda:75") is None
        monkeypatch.setattr(kernels, "find_spec", lambda name: None)
        assert kernels.load_kernels.__wrapped__("json") is None


@pytest.mark.parametrize(
    ("precision", "native", "half"),
    [
        ("auto", True, True),
        ("auto", False, False),
        ("bf16", False, True),
        ("float32", True, False),
    ],
)
def test_networks_compute_in_bfloat16_where_a_gpu_does(
    precision, native, half, monkeypatch
):
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: native
    )
    assert reduced(TrainConfig(precision=precision), torch.device("cuda")) is half
    assert reduced(TrainConfig(precision=precision), torch.device("cpu")) is (
        precision == "bf16"
    )
