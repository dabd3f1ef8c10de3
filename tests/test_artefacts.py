"""Artefacts that do not belong together are refused or named in one line; those that do
pass without a word.
"""

import json
import os
import shutil
import warnings
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
from safetensors.torch import load_file, save_file

import rfdlc
from rfdlc import Decider, InputError, Predictions, Utility
from rfdlc.lakes.decide import decide_lake
from rfdlc.lakes.evaluate import evaluate_lake
from rfdlc.monitoring.feedback import on_top
from rfdlc.monitoring.watch import watch
from rfdlc.predicting import predict as predicting
from rfdlc.serving.backend import open_backend
from rfdlc.training.model import Model
from rfdlc.training.run import Run

pytestmark = pytest.mark.usefixtures("quick_exports", "quick_calibration")
SMALL = {"epochs": 2, "widths": (8,), "device": "cpu", "checkpoint_every": 1}
ROWS = 40  # of what is predicted


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two runs of the same data and settings but their seeds, and what they wrote."""
    folder = tmp_path_factory.mktemp("made")
    made = SimpleNamespace(folder=folder, a=folder / "a", b=folder / "b")
    samples = rfdlc.load("digits-lt").test.take(np.arange(ROWS))
    np.save(folder / "x.npy", samples.array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed, run in enumerate((made.a, made.b)):
            rfdlc.train("digits-lt", "ce", run, seed=seed, **SMALL)
            for raw in (True, False):
                for kind in ("csv", "parquet"):
                    name = f"{run.name}-{'raw' if raw else 'corrected'}.{kind}"
                    rfdlc.predict(run, folder / "x.npy", folder / name, raw=raw)
            rfdlc.predict(run, folder / "x.npy", folder / f"{run.name}.npz")
        for name in ("one", "other"):
            rfdlc.embed(
                "digits-lt",
                folder / f"{name}.npz",
                backbone="resnet8",
                channels=1,
                image_size=8,
                flips=name == "other",
            )
        rfdlc.train(folder / "one.npz", "ce", folder / "features", epochs=1)
        rfdlc.export(made.a, folder / "a.onnx")
    return made


@pytest.fixture
def copy(made, tmp_path):
    """The first run in another folder, to be changed; and the second."""
    shutil.copytree(made.a, tmp_path / "run")
    return SimpleNamespace(path=tmp_path / "run", other=made.b, made=made)


def decider(run):
    return Decider.load(run)


def edited(file, change):
    """A JSON file with a change."""
    table = json.loads(file.read_text())
    change(table)
    file.write_text(json.dumps(table))


def reverse(file):
    edited(file, lambda table: table.update(names=table["names"][::-1]))


def behind_its_time(file, content):
    """Rewrite a file, and keep its time of change, as `cp -p` may."""
    before = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def interrupted(run, source, out, **options):
    """A prediction that ends after its first part."""
    write = predicting.Parts.write

    def once(parts, number, *rows):
        if number:
            raise KeyboardInterrupt
        write(parts, number, *rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predicting, "PART_ROWS", 16)
        patch.setattr(predicting.Parts, "write", once)
        with pytest.raises(KeyboardInterrupt):
            rfdlc.predict(run, source, out, **options)
    assert out.with_name(f"{out.name}.parts").is_dir()


def continued(run, source, out, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(predicting, "PART_ROWS", 16)
        return rfdlc.predict(run, source, out, **options)


# -- what does not belong together -----------------------------------------------------


def reversed_classes(copy):
    reverse(copy.path / "classes.json")
    Model.load(copy.path)


def reversed_classes_that_are_served(copy):
    reverse(copy.path / "classes.json")
    open_backend(copy.path)


def renamed_classes(copy):
    names = [f"class {c}" for c in range(10)]
    edited(copy.path / "classes.json", lambda table: table.update(names=names))
    Model.load(copy.path)


def another_decider_in_the_folder(copy):
    shutil.copy(copy.other / "decider.json", copy.path)
    Model.load(copy.path)


def other_weights_in_the_folder(copy):
    shutil.copy(copy.other / "model.safetensors", copy.path)
    Model.load(copy.path)


def weights_of_the_same_settings(copy):
    """As a training on another machine gives them."""
    file = copy.path / "model.safetensors"
    tensors = {name: 2 * values for name, values in load_file(file).items()}
    file.write_bytes(Run(copy.path).bound(tensors))
    Model.load(copy.path)


def another_configuration_in_the_folder(copy):
    shutil.copy(copy.other / "config.json", copy.path)
    Model.load(copy.path)


def another_scale_of_inputs(copy):
    def change(table):
        table["data"]["normalisation"]["mean"][0] += 0.1

    edited(copy.path / "config.json", change)
    Model.load(copy.path)


def another_familiarity(copy):
    shutil.copy(copy.other / "model.safetensors", copy.path / "familiarity.safetensors")
    Model.load(copy.path)


def another_checkpoint(copy):
    (copy.path / "metrics.json").unlink()
    shutil.copy(copy.other / "last.ckpt", copy.path)
    rfdlc.resume(copy.path)


def a_checkpoint_of_other_settings(copy):
    (copy.path / "metrics.json").unlink()
    edited(
        copy.path / "config.json",
        lambda table: table["settings"].update(learning_rate=0.5),
    )
    rfdlc.resume(copy.path)


def other_data(copy):
    (copy.path / "metrics.json").unlink()
    rfdlc.resume(copy.path, rfdlc.load("digits-lt", factor=10))


def another_decider_of_predictions(copy):
    decider(copy.other).decide(Predictions.load(copy.path))


def another_decider_of_logits(copy):
    decider(copy.other).decide(Predictions.load(copy.made.folder / "a.npz"))


def another_decider_of_a_table(copy):
    decider(copy.other).decide(Predictions.load(copy.made.folder / "a-raw.csv"))


def another_decider_of_a_frame(copy):
    decider(copy.other).decide(pandas.read_parquet(copy.made.folder / "a-raw.parquet"))


def another_decider_of_a_lake(copy):
    file = copy.made.folder / "a-raw.parquet"
    decide_lake(file, copy.path / "out", decider(copy.other))


def another_decider_in_an_evaluation_of_a_lake(copy):
    table = pandas.read_parquet(copy.made.folder / "a-raw.parquet")
    table.assign(target="0").to_parquet(copy.path / "labelled.parquet")
    evaluate_lake(copy.path / "labelled.parquet", decider(copy.other))


def another_decider_to_predict_with(copy):
    source = copy.made.folder / "x.npy"
    rfdlc.predict(copy.path, source, copy.path / "p.csv", decider=decider(copy.other))


def another_decider_to_export(copy):
    rfdlc.export(copy.path, copy.path / "m.onnx", decider=decider(copy.other))


def another_decider_to_serve(copy):
    open_backend(copy.path, decider=decider(copy.other))


def another_decider_of_an_exported_graph(copy):
    open_backend(copy.made.folder / "a.onnx", decider=decider(copy.other))


def another_decider_to_take_up(copy):
    on_top(decider(copy.path), decider(copy.other))


def another_decider_to_save_with_a_model(copy):
    model = Model.load(copy.path)
    model.decider = decider(copy.other)
    model.save_pretrained(copy.path / "saved")


def other_held_out_samples_for_sets(copy):
    held = Predictions.load(copy.other / "held-out.npz")
    decider(copy.path).fit_sets(held)


def other_held_out_samples_for_a_budget(copy):
    held = Predictions.load(copy.other / "held-out.npz")
    handing = decider(copy.path).utility.with_abstain(0.9)
    decider(copy.path).replace(utility=handing).fit_budget(held, budget=0.1)


def another_reference_of_a_watch(copy):
    watch(copy.path, reference=copy.other, decider=copy.path)


def a_utility_of_other_classes(copy):
    decider(copy.path).replace(utility=Utility.one_hot([f"c{i}" for i in range(10)]))


def probabilities_as_logits(copy):
    table = pandas.read_csv(copy.made.folder / "a-raw.csv")
    table.drop(columns="rfdlc_scores").to_csv(copy.path / "p.csv", index=False)
    Predictions.load(copy.path / "p.csv", logits=True)


def probabilities_in_an_array_of_logits(copy):
    p = Decider(Utility.one_hot(10)).probabilities(Predictions.load(copy.path))
    np.savez(copy.path / "p.npz", logits=np.asarray(p))
    Predictions.load(copy.path / "p.npz")


def corrected_twice(copy):
    scores = Predictions.load(copy.made.folder / "a-corrected.csv")
    decider(copy.path).decide(scores)


def scores_of_two_models(copy):
    both = [
        pandas.read_csv(copy.made.folder / f"{name}-raw.csv") for name in ("a", "b")
    ]
    pandas.concat(both).to_csv(copy.path / "both.csv", index=False)
    Predictions.load(copy.path / "both.csv")


def scores_of_two_priors(copy):
    file = copy.made.folder / "x.npy"
    for prior in ("uniform", "train"):
        rfdlc.predict(copy.path, file, copy.path / f"{prior}.csv", target_prior=prior)
    both = [pandas.read_csv(copy.path / f"{name}.csv") for name in ("uniform", "train")]
    pandas.concat(both).to_csv(copy.path / "both.csv", index=False)
    Predictions.load(copy.path / "both.csv")


def parts_of_another_array(copy):
    x = np.load(copy.made.folder / "x.npy")
    source, out = copy.path / "x.npy", copy.path / "p.csv"
    np.save(source, x)
    interrupted(copy.path, source, out)
    (copy.path / "changed").mkdir()
    np.save(copy.path / "changed" / "x.npy", x[::-1])
    behind_its_time(source, (copy.path / "changed" / "x.npy").read_bytes())
    continued(copy.path, source, out)


def parts_of_other_images(copy):
    from PIL import Image

    source, out = copy.path / "photos", copy.path / "p.csv"
    source.mkdir()
    for i, pixels in enumerate(np.load(copy.made.folder / "x.npy")[:, 0]):
        Image.fromarray((16 * pixels).astype(np.uint8)).save(source / f"{i:02}.bmp")
    interrupted(copy.path, source, out)
    behind_its_time(source / "03.bmp", (source / "04.bmp").read_bytes())
    continued(copy.path, source, out)


def parts_of_another_calibration(copy):
    source, out = copy.made.folder / "x.npy", copy.path / "p.csv"
    held = Predictions.load(copy.path / "held-out.npz")
    other = decider(copy.path).replace(calibration="temperature").fit(held)
    interrupted(copy.path, source, out)
    continued(copy.path, source, out, decider=other)


def a_lake_of_another_decider(copy):
    source, out = copy.made.folder / "a-raw.parquet", copy.path / "out"
    own = decider(copy.path)
    decide_lake(source, out, own)
    decide_lake(source, out, own.replace(utility=own.utility.with_abstain(0.7)))


def features_of_another_encoder(copy):
    folder = copy.made.folder
    rfdlc.predict(folder / "features", folder / "other.npz", copy.path / "p.csv")


def features_without_an_encoder(copy):
    x = np.load(copy.made.folder / "one.npz")["test_x"]
    np.save(copy.path / "x.npy", x)
    run = copy.made.folder / "features"
    rfdlc.predict(run, copy.path / "x.npy", copy.path / "p.csv")


def weights_that_do_not_say_their_classes(copy):
    file = copy.path / "model.safetensors"
    save_file(load_file(file), file)
    Model.load(copy.path)


def a_decider_that_does_not_say_its_model(copy):
    edited(copy.path / "decider.json", lambda table: table["model"].update(source=""))
    Model.load(copy.path)


def a_decider_given_that_does_not_say_its_model(copy):
    edited(copy.path / "decider.json", lambda table: table["model"].update(source=""))
    open_backend(copy.made.folder / "a.onnx", decider=decider(copy.path))


def predictions_that_do_not_say_their_model(copy):
    table = pandas.read_csv(copy.made.folder / "a-raw.csv")
    table.drop(columns="rfdlc_scores").to_csv(copy.path / "p.csv", index=False)
    decider(copy.path).decide(Predictions.load(copy.path / "p.csv"))


def a_lake_that_does_not_say_its_model(copy):
    table = pandas.read_parquet(copy.made.folder / "a-raw.parquet")
    table.drop(columns="rfdlc_scores").to_parquet(copy.path / "p.parquet")
    decide_lake(copy.path / "p.parquet", copy.path / "out", decider(copy.path))


ORDER = r"outputs of .* are the classes 0, .*classes.json has in another order"
OTHER = r"(is|are) of model \w{16}, but .* of model \w{16}: "
REFUSED = {
    reversed_classes: ORDER,
    reversed_classes_that_are_served: ORDER,
    renamed_classes: r"outputs of .* are the classes 0, .*classes.json has other ones",
    another_decider_in_the_folder: OTHER,
    other_weights_in_the_folder: "of a run with other settings or data",
    weights_of_the_same_settings: OTHER,
    another_configuration_in_the_folder: "of a run with other settings or data",
    another_scale_of_inputs: "of a run with other settings or data",
    another_familiarity: r"familiarity\.safetensors is of a run with other settings",
    another_checkpoint: r"last\.ckpt is of a run with other settings or data",
    a_checkpoint_of_other_settings: r"last\.ckpt is of a run with other settings",
    other_data: "was trained on other data",
    another_decider_of_predictions: OTHER,
    another_decider_of_logits: OTHER,
    another_decider_of_a_table: OTHER,
    another_decider_of_a_frame: OTHER,
    another_decider_of_a_lake: OTHER,
    another_decider_in_an_evaluation_of_a_lake: OTHER,
    another_decider_to_predict_with: OTHER,
    another_decider_to_export: OTHER,
    another_decider_to_serve: OTHER,
    another_decider_of_an_exported_graph: OTHER,
    another_decider_to_take_up: OTHER,
    another_decider_to_save_with_a_model: OTHER,
    other_held_out_samples_for_sets: OTHER,
    other_held_out_samples_for_a_budget: OTHER,
    another_reference_of_a_watch: OTHER,
    a_utility_of_other_classes: "classes .* do not match",
    probabilities_as_logits: "these are probabilities, not logits",
    probabilities_in_an_array_of_logits: "these are probabilities, not logits",
    corrected_twice: "calibrated and corrected already",
    scores_of_two_models: "scores of different models, priors or kinds",
    scores_of_two_priors: "scores of different models, priors or kinds",
    parts_of_another_array: r"was begun with other settings \(source\)",
    parts_of_other_images: r"was begun with other settings \(source\)",
    parts_of_another_calibration: r"was begun with other settings \(calibrator\)",
    a_lake_of_another_decider: r"was begun with other settings \(decider\)",
    features_of_another_encoder: "this model was trained on other ones",
}
TRUST = r"does not say .* (is|are) taken on trust$"
NAMED = (
    features_without_an_encoder,
    weights_that_do_not_say_their_classes,
    a_decider_that_does_not_say_its_model,
    a_decider_given_that_does_not_say_its_model,
    predictions_that_do_not_say_their_model,
    a_lake_that_does_not_say_its_model,
)


def named(functions):
    return [pytest.param(each, id=each.__name__) for each in functions]


@pytest.mark.parametrize("case", named(REFUSED))
@pytest.mark.filterwarnings("ignore")
def test_what_does_not_belong_together_is_refused(copy, case):
    with pytest.raises(InputError, match=REFUSED[case]):
        case(copy)


@pytest.mark.parametrize("case", named(NAMED))
def test_what_is_taken_on_trust_is_named_in_one_line(copy, case):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        case(copy)
    told = [str(each.message) for each in caught]
    assert len([text for text in told if "trust" in text]) == 1
    with pytest.warns(UserWarning, match=TRUST):
        warnings.warn(next(text for text in told if "trust" in text), stacklevel=1)


# -- what does -------------------------------------------------------------------------


def a_run_in_another_folder(copy):
    x = np.load(copy.made.folder / "x.npy")
    here, there = (Model.load(path).decide(x) for path in (copy.path, copy.made.a))
    assert np.array_equal(here, there)


def a_run_whose_data_moved(copy):
    def change(table):
        table["data"].update(source="elsewhere", root="/data", notes=[])
        table["settings"].update(workers=3, keep=[0.5])

    edited(copy.path / "config.json", change)
    Model.load(copy.path)


def a_model_saved_for_others(copy):
    Model.load(copy.path).save_pretrained(copy.path / "saved")
    Model.from_pretrained(copy.path / "saved")


def a_finished_run_that_is_resumed(copy):
    (copy.path / "metrics.json").unlink()
    rfdlc.resume(copy.path)


def a_fork_with_other_settings(copy):
    rfdlc.fork(copy.path, copy.path / "fork", epochs=3, learning_rate=0.01)


def a_decider_that_was_moved(copy):
    decider(copy.path).save(copy.path / "moved.json")
    Decider.load(copy.path / "moved.json").decide(Predictions.load(copy.path))


def other_actions(copy):
    own = decider(copy.path)
    handing = own.replace(utility=own.utility.with_abstain(0.7))
    rfdlc.predict(
        copy.path, copy.made.folder / "x.npy", copy.path / "p.csv", decider=handing
    )
    handing.decide(Predictions.load(copy.path))


def a_utility_in_another_order(copy):
    names = decider(copy.path).utility.classes.names[::-1]
    utility = decider(copy.path).replace(utility=Utility.one_hot(names))
    utility.decide(Predictions.load(copy.path))


def another_target_prior(copy):
    other = decider(copy.path).replace(target_prior="uniform")
    other.decide(Predictions.load(copy.made.folder / "a-raw.csv"))


def some_rows(copy):
    decider(copy.path).decide(Predictions.load(copy.path).take(np.arange(5)))


def arrays_of_either_precision(copy):
    values = Predictions.load(copy.path).scores.values
    chosen = [
        decider(copy.path).decide(values.astype(kind), logits=True)
        for kind in (np.float32, np.float64)
    ]
    assert np.array_equal(*chosen)


def columns_in_another_order(copy):
    table = pandas.read_csv(copy.made.folder / "a-raw.csv", dtype=str)
    table = table[[*map(str, range(9, -1, -1)), "rfdlc_scores"]]
    table.to_csv(copy.path / "p.csv", index=False)
    names = [str(c) for c in range(10)]
    decider(copy.path).decide(Predictions.load(copy.path / "p.csv", names))


def tables_of_every_kind(copy):
    for name in ("a-raw.csv", "a-raw.parquet", "a.npz"):
        decider(copy.path).decide(Predictions.load(copy.made.folder / name))


def a_lake_of_the_model(copy):
    file = copy.made.folder / "a-raw.parquet"
    decide_lake(file, copy.path / "out", decider(copy.path))


def corrected_probabilities_by_a_utility(copy):
    scores = Predictions.load(copy.made.folder / "a-corrected.csv")
    Decider(Utility.one_hot(scores.classes).with_abstain(0.7)).decide(scores)


def own_held_out_samples(copy):
    held = Predictions.load(copy.path / "held-out.npz")
    handing = decider(copy.path).utility.with_abstain(0.7)
    fitted = decider(copy.path).replace(utility=handing).fit_budget(held, budget=0.1)
    fitted.fit_unfamiliar(held).decide(Predictions.load(copy.path))


def another_calibration_of_the_same_model(copy):
    held = Predictions.load(copy.path / "held-out.npz")
    utility = decider(copy.path).utility
    fitted = Decider(utility, calibration="temperature").fit(held)
    fitted.decide(Predictions.load(copy.path))
    open_backend(copy.path, decider=fitted)


def a_decider_that_is_fitted_to_another_model(copy):
    held = Predictions.load(copy.other / "held-out.npz")
    decider(copy.path).fit(held).decide(Predictions.load(copy.other))


def somebody_elses_tables(copy):
    rng = np.random.default_rng(0)
    for name in ("held", "new"):
        p = rng.dirichlet((1, 1), 60)
        table = pandas.DataFrame(p, columns=["cat", "dog"])
        table["target"] = np.where(rng.random(60) < p[:, 0], "cat", "dog")
        table.to_csv(copy.path / f"{name}.csv", index=False)
    fitted = Decider(Utility.one_hot(["cat", "dog"]), calibration="temperature").fit(
        Predictions.load(copy.path / "held.csv")
    )
    fitted.save(copy.path / "theirs.json")
    theirs = Decider.load(copy.path / "theirs.json")
    theirs.decide(Predictions.load(copy.path / "new.csv"))


def an_exported_graph_and_the_decider_of_its_run(copy):
    other = decider(copy.path).replace(target_prior="uniform")
    open_backend(copy.made.folder / "a.onnx", decider=other)


def a_recalibrated_decider(copy):
    other = decider(copy.path).replace(target_prior="uniform")
    on_top(decider(copy.path), other)


def parts_of_a_copy(copy):
    source, out = copy.path / "x.npy", copy.path / "p.csv"
    shutil.copy(copy.made.folder / "x.npy", source)
    interrupted(copy.path, source, out)
    (copy.path / "moved").mkdir()
    moved = shutil.move(source, copy.path / "moved" / "x.npy")
    os.utime(moved, (1, 1))
    done = continued(copy.path, moved, out)
    assert done.samples == ROWS


def features_of_the_same_encoder(copy):
    folder = copy.made.folder
    rfdlc.predict(folder / "features", folder / "one.npz", copy.path / "p.csv")


def genuine_logits(copy):
    rng = np.random.default_rng(0)
    plain = Decider(Utility.one_hot(3))
    small = rng.random((200, 3)) / 3
    for logits in (
        small,  # between 0 and 1, with sums around 1/2
        np.zeros((5, 3)),
        np.full((5, 3), np.float32(1 / 3)),  # of a constant model: one row
        np.log(rng.dirichlet((1, 1, 1), 200)),
        np.vstack([rng.dirichlet((1, 1, 1), 200), [[0, 3, 1]]]),
    ):
        plain.decide(logits, logits=True)


BELONGS = (
    a_run_in_another_folder,
    a_run_whose_data_moved,
    a_model_saved_for_others,
    a_finished_run_that_is_resumed,
    a_fork_with_other_settings,
    a_decider_that_was_moved,
    other_actions,
    a_utility_in_another_order,
    another_target_prior,
    some_rows,
    arrays_of_either_precision,
    columns_in_another_order,
    tables_of_every_kind,
    a_lake_of_the_model,
    corrected_probabilities_by_a_utility,
    own_held_out_samples,
    another_calibration_of_the_same_model,
    a_decider_that_is_fitted_to_another_model,
    somebody_elses_tables,
    an_exported_graph_and_the_decider_of_its_run,
    a_recalibrated_decider,
    parts_of_a_copy,
    features_of_the_same_encoder,
    genuine_logits,
)


@pytest.mark.parametrize("case", named(BELONGS))
@pytest.mark.filterwarnings("error::UserWarning")
def test_what_belongs_together_passes_without_a_warning(copy, case):
    case(copy)


def test_the_tables_are_long_enough():
    assert len(REFUSED) + len(NAMED) >= 20
    assert len(BELONGS) >= 20
