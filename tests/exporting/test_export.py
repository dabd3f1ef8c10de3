"""Exported files decide as the library does, and say so when they cannot."""

import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastapi import HTTPException
from torch import nn
from typer.testing import CliRunner

import rfdlc
from rfdlc.cli import app
from rfdlc.data.images import resized
from rfdlc.decisions.budgets import Budget
from rfdlc.exporting import graph
from rfdlc.exporting.export import (
    TOLERANCE,
    handed_over_text,
    random_samples,
    write_card,
)
from rfdlc.predicting.onnx_model import CHECKSUM_LENGTH, with_checksum
from rfdlc.serving.backend import Limits, open_backend
from rfdlc.serving.requests import Reader
from rfdlc.training.run import Run

pytest.importorskip(
    "onnxruntime", reason='export tests need pip install "rfdlc[export]"'
)


def own_network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(100, 8),
    )


# The other methods and backbones: benchmarks/export.py.
pytestmark = pytest.mark.usefixtures("quick_tables", "quick_exports")
CASES = [("rf-dlc-paper", "resnet8"), ("ce", "own"), ("rf-dlc", "mlp"), ("ride", "mlp")]


@pytest.mark.parametrize(("method", "backbone"), CASES)
def test_decisions_equal_the_librarys(trained, tmp_path, method, backbone):
    network = own_network if backbone == "own" else None
    run = trained(method, backbone, network)
    model = rfdlc.Model.load(run, backbone=network, device="cpu")
    rng = np.random.default_rng(1)
    utility = rfdlc.Utility(rng.uniform(-1, 1, (6, 8)), model.classes, list("stuvwxyz"))
    replaceable = method == "ride"  # the utility: by default the one given here
    done = rfdlc.export(
        run,
        tmp_path / "model.onnx",
        utility=utility,
        utility_input=replaceable,
        backbone=network,
    )
    assert done.parity.decisions_changed == 0
    inputs = (
        rng.integers(0, 196, (1000, 1, 1, 1)) + rng.integers(0, 60, (1000, 3, 12, 12))
    ).astype(np.uint8)
    found = rfdlc.OnnxModel.load(done.path).decide(inputs)
    decider, predictions = model.decider.replace(utility=utility), model.predict(inputs)
    np.testing.assert_allclose(
        found.probabilities, decider.probabilities(predictions), atol=TOLERANCE
    )
    values = decider.utility.gains(decider.probabilities(predictions))
    top = np.sort(values, axis=1)
    clear = top[:, -1] - top[:, -2] > 1e-4
    assert clear.mean() > 0.5
    assert np.bincount(found.action).max() < 950  # decisions differ from input to input
    assert (found.action == decider.decide(predictions))[clear].all()
    np.testing.assert_allclose(found.expected_utility, values, atol=1e-4)


@pytest.fixture(scope="module")
def run(trained):
    return trained("rf-dlc", "mlp")


@pytest.fixture(scope="module")
def done(run, tmp_path_factory):
    return rfdlc.export(run, tmp_path_factory.mktemp("exported") / "model.onnx")


@pytest.fixture(scope="module")
def exported(done):
    return done.path


@pytest.fixture(scope="module")
def flexible(run, tmp_path_factory):
    """With the utility as an input, for images of any size."""
    path = tmp_path_factory.mktemp("flexible") / "model.onnx"
    return rfdlc.OnnxModel.load(
        rfdlc.export(run, path, utility_input=True, resize=True).path
    )


def test_the_utility_as_an_input(run, flexible):
    found, model = flexible, rfdlc.Model.load(run, device="cpu")
    inputs = random_samples(model, 50)
    for utility in (
        None,
        rfdlc.Utility.tail_sensitive(model.classes, -3).with_abstain(0.5),
    ):
        expected = model.decide(inputs, utility)
        assert (found.decide(inputs, utility).action == expected).all()
    larger = np.random.default_rng(0).integers(0, 256, (20, 3, 31, 45), dtype=np.uint8)
    brought = model.decider.probabilities(model.predict(resized(larger, 12)))
    with pytest.warns(UserWarning, match=r"20 images are long.* up to 31%"):
        decided = found.decide(larger)
    np.testing.assert_allclose(
        decided.probabilities, brought, atol=0.02
    )  # a level here and there
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.decide(larger[..., :41])  # less than 4:3


def test_a_utility_input_with_a_large_offset(run, flexible):
    """What all actions share decides nothing: 1e7 in 32 bits would hide differences
    below 1.
    """
    found, model = flexible, rfdlc.Model.load(run, device="cpu")
    rng, plain = np.random.default_rng(1), rfdlc.Utility.one_hot(model.classes)
    inputs = (
        rng.integers(0, 196, (200, 1, 1, 1)) + rng.integers(0, 60, (200, 3, 12, 12))
    ).astype(np.uint8)
    lifted = rfdlc.Utility(plain.matrix + 1e7, model.classes)
    decided = found.decide(inputs, lifted)
    assert (decided.action == model.decide(inputs, plain)).all()
    assert len(np.unique(decided.action)) > 1
    np.testing.assert_allclose(
        decided.expected_utility,
        found.decide(inputs, plain).expected_utility + 1e7,
        rtol=1e-6,
    )


def test_another_utility_without_a_new_export(run, exported):
    found, model = rfdlc.OnnxModel.load(exported), rfdlc.Model.load(run, device="cpu")
    utility, inputs = (
        rfdlc.Utility.one_hot(model.classes).with_abstain(0.6),
        random_samples(model, 50),
    )
    assert (found.decide(inputs, utility).action == model.decide(inputs, utility)).all()
    turned = utility.with_classes(
        model.classes.in_order(model.classes.names[::-1])
    )  # other numbers, the same names
    names = [
        [own.actions[k] for k in found.decide(inputs, own).action]
        for own in (utility, turned)
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize(("precision", "share"), [("half", 0.75), ("int8", 0.65)])
def test_smaller_files_report_what_changed(run, exported, tmp_path, precision, share):
    small = rfdlc.export(run, tmp_path / "small.onnx", precision=precision)
    assert small.path.stat().st_size < share * exported.stat().st_size
    assert 0 < small.parity.largest_difference < 0.2
    assert small.parity.decisions_changed < 0.2 * small.parity.samples
    assert precision in small.card.read_text()


def test_torch_export(run, tmp_path):
    done = rfdlc.export(run, tmp_path / "model.pt2")
    assert done.parity.decisions_changed == 0
    files = {"rfdlc.json": ""}
    program = torch.export.load(done.path, extra_files=files)
    assert json.loads(files["rfdlc.json"])["provenance"]["method"] == "rf-dlc"
    assert program.module()(torch.zeros(7, 3, 12, 12, dtype=torch.uint8))[2].shape == (
        7,
    )


# -- what is refused
# --------------------------------------------------------------------------------------


def test_a_changed_file_is_refused(exported, tmp_path):
    data, copy = bytearray(exported.read_bytes()), tmp_path / "model.onnx"
    for position in (100, len(data) // 2, len(data) - 5):
        changed = bytearray(data)
        changed[position] ^= 1
        copy.write_bytes(changed)
        with pytest.raises(rfdlc.InputError, match="changed after it was exported"):
            rfdlc.OnnxModel.load(copy)
    for other in (b"", b"no model", bytes(data[:-CHECKSUM_LENGTH])):
        copy.write_bytes(other)
        with pytest.raises(rfdlc.InputError, match="no checksum of rfdlc"):
            rfdlc.OnnxModel.load(copy)


def test_samples_that_the_graph_does_not_take_are_refused(exported):
    model = rfdlc.OnnxModel.load(exported)
    good = np.zeros((2, *model.input_shape), np.uint8)
    for wrong, message in (
        (good[:0], r"samples have shape \(0, "),
        (good[0], "expected .N, "),
        (good / 255, "uint8"),
    ):
        with pytest.raises(rfdlc.InputError, match=message):
            model.decide(wrong)


def test_metadata_that_do_not_describe_the_graph_are_refused(exported, tmp_path):
    import onnx

    def rewritten(change):
        model = onnx.load_model_from_string(exported.read_bytes()[:-CHECKSUM_LENGTH])
        table = json.loads(model.metadata_props[0].value)
        change(table)
        model.metadata_props[0].value = json.dumps(table)
        (tmp_path / "model.onnx").write_bytes(with_checksum(model.SerializeToString()))
        return tmp_path / "model.onnx"

    def fewer_classes(table):
        table["decider"] = rfdlc.Decider(
            rfdlc.Utility.one_hot(["a", "b"]), calibration=None
        ).to_dict()

    def other_utility(table):
        table["decider"]["utility"]["matrix"][2][3] = 0.5

    changes = {
        "the metadata say": fewer_classes,
        "but the graph has": lambda table: table.update(utility_input=True),
        "does not decide by the utility": other_utility,
        "metadata are not those": lambda table: table.pop("resize"),
        "has format version 2: this rfdlc reads version 4": lambda table: table.update(
            version=2
        ),
        "differ by 0.* from those at export": lambda table: table.update(
            reference=[1, 0, 0, 0, 0, 0]
        ),
    }
    for message, change in changes.items():
        with pytest.raises(rfdlc.InputError, match=message):
            rfdlc.OnnxModel.load(rewritten(change))
    assert rfdlc.OnnxModel.load(rewritten(lambda table: None)).classes.names[0] == "ant"


@pytest.mark.parametrize("where", ["initializer", "attribute"])
def test_external_data_are_refused(exported, tmp_path, monkeypatch, where):
    """A file of the working directory must not supply weights that the checksum does
    not cover.
    """
    import onnx
    from onnx.external_data_helper import set_external_data

    model = onnx.load_model_from_string(exported.read_bytes()[:-CHECKSUM_LENGTH])
    tensor = next(
        tensor for tensor in model.graph.initializer if len(tensor.raw_data) > 100
    )
    if where == "attribute":
        node = onnx.helper.make_node("Constant", [], [tensor.name], value=tensor)
        model.graph.initializer.remove(tensor)
        model.graph.node.insert(0, node)
        tensor = model.graph.node[0].attribute[0].t
    (tmp_path / "weights.bin").write_bytes(tensor.raw_data)
    set_external_data(tensor, "weights.bin")
    tensor.ClearField("raw_data")
    (tmp_path / "model.onnx").write_bytes(with_checksum(model.SerializeToString()))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(rfdlc.InputError, match="takes weights from other files"):
        rfdlc.OnnxModel.load("model.onnx")


def test_outputs_are_read_by_name(run, exported, tmp_path):
    import onnx

    model = onnx.load_model_from_string(exported.read_bytes()[:-CHECKSUM_LENGTH])
    outputs = list(model.graph.output)
    del model.graph.output[:]
    model.graph.output.extend(outputs[::-1])
    (tmp_path / "model.onnx").write_bytes(with_checksum(model.SerializeToString()))
    inputs = random_samples(rfdlc.Model.load(run, device="cpu"), 20)
    decided, expected = (
        rfdlc.OnnxModel.load(file).decide(inputs)
        for file in (tmp_path / "model.onnx", exported)
    )
    np.testing.assert_array_equal(decided.action, expected.action)
    np.testing.assert_array_equal(decided.probabilities, expected.probabilities)


def test_a_graph_that_is_not_the_model_is_not_written(run, tmp_path, monkeypatch):
    right = graph.DecisionGraph

    def wrong(model, *rest, **options):
        graph = right(model, *rest, **options)
        graph.head.bias += torch.arange(6) / 10
        return graph

    monkeypatch.setattr(graph, "DecisionGraph", wrong)
    with pytest.raises(rfdlc.InputError, match="is not the model"):
        rfdlc.export(run, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("model.txt", {}, "did you mean|expected one of .onnx, .pt2"),
        ("model.onnx", {"precision": "int4"}, "int8"),
        ("model.pt2", {"precision": "int8"}, "for ONNX"),
    ],
)
def test_bad_wishes(run, tmp_path, name, options, message):
    with pytest.raises(rfdlc.InputError, match=message):
        rfdlc.export(run, tmp_path / name, **options)


def test_resize_is_for_squares(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (20, 6, 9, 3), dtype=np.uint8), np.arange(20) % 2
    rfdlc.train(
        images,
        "ce",
        tmp_path / "run",
        backbone="mlp",
        widths=(4,),
        epochs=1,
        hold_out=0,
        device="cpu",
    )
    with pytest.raises(
        rfdlc.InputError, match=r"resize is for square images, but .* shape \(3, 6, 9\)"
    ):
        rfdlc.export(tmp_path / "run", tmp_path / "model.onnx", resize=True)
    backend = open_backend(tmp_path / "run")
    with pytest.raises(
        HTTPException,
        match=r"does not accept image files: expected arrays .* shape \(3, 6, 9\)",
    ):
        Reader(backend, Limits()).read_image(b"", np.inf)


@pytest.mark.parametrize(
    "samples",
    [np.zeros((2, 3, 12, 13), np.uint8), np.zeros((2, 3, 12, 12)), np.zeros(3)],
)
def test_wrong_samples(exported, samples):
    with pytest.raises(rfdlc.InputError, match="expected"):
        rfdlc.OnnxModel.load(exported).decide(samples)


# -- the rest of what is written
# --------------------------------------------------------------------------------------


def test_the_file_names_no_machine(exported, run):
    data = exported.read_bytes()
    for secret in (
        str(run).encode(),
        str(exported.parent).encode(),
        b".py",
        b"site-packages",
    ):
        assert secret not in data


def test_the_card(run, exported):
    text = (exported.parent / "README.md").read_text()
    assert not (run / "README.md").exists()  # its own decisions may be others
    header = pytest.importorskip("yaml").safe_load(text.split("---")[1])
    assert header["library_name"] == "rfdlc"
    metrics = header["model-index"][0]["results"][0]["metrics"]
    assert {"accuracy", "balanced_accuracy", "ece"} <= {
        metric["type"] for metric in metrics
    }
    for words in (
        "## Data",
        "88 training samples",
        "accuracy, tail",
        "## Utility",
        "| ant |",
        "## Limits",
    ):
        assert words in text
    assert "in the paper" not in text


@pytest.mark.parametrize("text", ["mine", "library_name: rfdlc\nother.onnx"])
def test_another_readme_stays(text, run, done, tmp_path):
    (tmp_path / "README.md").write_text(text)
    card = write_card(
        rfdlc.Model.load(run), tmp_path / "model.pt2", "float32", done.parity
    )
    assert card.name == "model.md"
    assert (tmp_path / "README.md").read_text() == text


def test_a_folder_with_other_files_gets_no_readme(run, done, tmp_path):
    (tmp_path / "notes.txt").touch()
    for _ in range(2):
        card = write_card(
            rfdlc.Model.load(run), tmp_path / "model.pt2", "float32", done.parity
        )
        assert card.name == "model.md"
    assert not (tmp_path / "README.md").exists()


def test_rows_of_a_table(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["age,dose,colour,kind"]
    for k in [0] * 60 + [1] * 20:
        age, dose = rng.normal(40 + 20 * k), rng.normal() / 1000
        lines.append(
            f"{age:.2f},{dose:.5f},{'red' if k else 'blue'},{'ill' if k else 'well'}"
        )
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    model = rfdlc.train(
        tmp_path / "rows.csv",
        "ce",
        tmp_path / "run",
        data_options={"target": "kind"},
        epochs=3,
        device="cpu",
    )
    done = rfdlc.export(tmp_path / "run", tmp_path / "model.onnx")
    rows = {
        "age": ["39", "61", ""],
        "dose": ["0", "0.001", "0"],
        "colour": ["blue", "red", "green"],
    }
    exported = rfdlc.OnnxModel.load(done.path)
    assert (exported.decide(rows).action == model.decide(rows)).all()
    with pytest.raises(rfdlc.InputError, match="sample 1 holds numbers too large"):
        exported.decide(
            {"age": ["39", "40"], "dose": ["0", "3e38"], "colour": ["blue", "red"]}
        )


def test_rows_far_from_all_training_rows(tmp_path):
    """They are decided as rows at the edge of what training saw, also where log
    probabilities are -100 and below, of which no exponential is left in 32 bits; a date
    of 0 is far, too.
    """
    rng = np.random.default_rng(0)
    amount, day = (
        rng.lognormal(0, 1, 200),
        np.datetime64("2024-01-01") + rng.integers(0, 60, 200),
    )
    kind = np.digitize(np.log(amount) + rng.normal(0, 0.5, 200), [0.8, 1.6])
    lines = [
        f"{a:.4f},{d},{['low', 'mid', 'high'][k]}"
        for a, d, k in zip(amount, day, kind, strict=True)
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["amount,day,kind", *lines]))
    options = {"data_options": {"target": "kind"}, "device": "cpu"}
    model = rfdlc.train(tmp_path / "rows.csv", "rf-dlc", tmp_path / "run", **options)
    assert model.config.backbone == "mixture"
    run = Run(tmp_path / "run")
    weights = run.weights()
    weights["slope"] *= 200
    run.write_model(weights)
    (run.path / "predictions.npz").unlink()  # of the weights before
    model = rfdlc.Model.load(tmp_path / "run", device="cpu")
    exported = rfdlc.OnnxModel.load(
        rfdlc.export(tmp_path / "run", tmp_path / "model.onnx").path
    )
    rows = {
        "amount": ["1", "1000", "1e6", "-1000"],
        "day": ["2024-01-09", "2024-01-09", "2030-01-01", "1970-01-01"],
    }
    most, least = f"{amount.max():.4f}", f"{amount.min():.4f}"
    edges = {
        "amount": ["1", most, most, least],
        "day": ["2024-01-09", "2024-01-09", str(day.max()), str(day.min())],
    }
    predictions = model.predict(rows)
    assert predictions.scores.values.min() < -500
    at_edges = model.predict(edges).scores.values
    np.testing.assert_allclose(predictions.scores.values, at_edges, rtol=1e-5)
    own = model.decider.probabilities(predictions)
    np.testing.assert_allclose(
        exported.decide(rows).probabilities, own, rtol=0, atol=1e-4
    )


def test_dates_of_new_rows(tmp_path):
    """Read alike from a file, a frame, arrays and lists, by the run and by what is
    exported.
    """
    pd, day = pytest.importorskip("pandas"), np.timedelta64(1, "D")
    seen = np.datetime64("2024-01-01", "ns") + np.arange(80) * day
    table = pd.DataFrame(
        {"seen": seen, "kind": np.where(np.arange(80) < 50, "early", "late")}
    )
    table.loc[7, "seen"] = None
    table.sample(frac=1, random_state=0).to_parquet(tmp_path / "t.parquet")
    options = {
        "data_options": {"target": "kind"},
        "backbone": "mlp",
        "epochs": 30,
        "device": "cpu",
    }
    model = rfdlc.train(tmp_path / "t.parquet", "ce", tmp_path / "run", **options)
    assert model.input_shape == (2,)
    new = pd.DataFrame(
        {"seen": np.array(["2023-12-01", "2031-01-01", "NaT"], "datetime64[ns]")}
    )
    new.to_parquet(tmp_path / "new.parquet")
    new.to_csv(tmp_path / "new.csv", index=False)
    rows = {"seen": ["2023-12-01", "2031-01-01T00:00Z", ""]}
    expected = model.predict(rows).scores.values
    kinds = (
        tmp_path / "new.parquet",
        tmp_path / "new.csv",
        new,
        {"seen": new["seen"].to_numpy()},
    )
    for given in kinds:
        np.testing.assert_array_equal(model.predict(given).scores.values, expected)
    assert [model.classes.names[i] for i in model.decide(rows)[:2]] == ["early", "late"]
    exported = rfdlc.OnnxModel.load(
        rfdlc.export(tmp_path / "run", tmp_path / "model.onnx").path
    )
    for given in (rows, kinds[-1]):
        np.testing.assert_array_equal(exported.decide(given).action, model.decide(rows))


def test_the_command(run, tmp_path):
    out = tmp_path / "model.pt2"
    result = CliRunner().invoke(
        app, ["export", str(run), str(out), "--utility", "tail-sensitive", "--json"]
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["decisions_changed"] == 0
    assert told["bytes"] == out.stat().st_size
    both = CliRunner().invoke(app, ["export", str(run), str(out), "--half", "--int8"])
    assert isinstance(both.exception, rfdlc.InputError)


def test_the_card_has_the_share_that_prices_hand_over(trained, tmp_path):
    """By a price that is far from right: one batch would keep to the share exactly."""
    folder = trained("rf-dlc", "mlp")
    model = rfdlc.Model.load(folder, device="cpu")
    utility = model.decider.utility.with_abstain(1.0)
    decider = model.decider.replace(utility=utility)
    test = rfdlc.Predictions.load(folder / "predictions.npz")
    gains = 1 - decider.probabilities(test).max(axis=1)
    price = float(np.quantile(gains, 0.4))
    decider = decider.replace(budget=Budget({"total": 0.2}, {"total": price}, 50.0))
    handed = (gains > price).mean()
    assert 0.5 < handed < 0.7
    text = rfdlc.export(folder, tmp_path / "m.onnx", decider=decider).card.read_text()
    assert f"Handed over, of {len(test)} test samples, one at a time by price" in text
    error = 1.96 * np.sqrt(0.16 / len(test) + 0.16 / 50)
    row = f"| total | 20% | {handed:.2%} | {0.2 - error:.1%} to {0.2 + error:.1%} |"
    assert row in text
    assert f"| abstained | {handed:.2%} |" in text

    held = rfdlc.Predictions.load(folder / "held-out.npz")
    without = handed_over_text(
        SimpleNamespace(path=folder, decider=decider.fit_budget(held, budget=0.2)), None
    )
    assert f"of {len(held)} held-out samples, from which prices are found" in without
    assert not handed_over_text(model, test)
