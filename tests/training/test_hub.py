"""Models as folders that others load, and the hub, of which only what reaches it is
tested here: nothing is sent.
"""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest

import rfdlc
from rfdlc.errors import InputError
from rfdlc.training import hub


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return rfdlc.train(
        "digits-lt", "rf-dlc", tmp_path_factory.mktemp("hub") / "run", epochs=2
    )


def test_a_saved_model_predicts_and_decides_as_before(model, tmp_path):
    images = rfdlc.load("digits-lt").test.inputs
    utility = rfdlc.Utility.tail_sensitive(model.classes, -1).with_abstain(0.5)
    other = rfdlc.Model.load(model.path)
    other.decider = other.decider.replace(utility=utility, target_prior="train")
    loaded = rfdlc.Model.from_pretrained(other.save_pretrained(tmp_path / "saved"))
    assert np.array_equal(
        loaded.predict(images).scores.values, model.predict(images).scores.values
    )
    assert np.array_equal(loaded.decide(images), other.decide(images))
    assert loaded.decider.utility.actions[-1] == "abstain"
    names = {file.name for file in (tmp_path / "saved").iterdir()}
    assert names >= {"config.json", "model.safetensors", "decider.json", "README.md"}
    assert not names & {"last.ckpt", "predictions.npz", "held-out.npz", ".lock"}
    card, found = (
        (tmp_path / "saved" / "README.md").read_text(),
        rfdlc.Predictions.load(model.path / "predictions.npz"),
    )
    assert (
        str(rfdlc.evaluate(found, decider=other.decider)) in card
    )  # of the decisions that are shared
    assert "abstain" in card


def test_saving_again_keeps_a_readme_and_takes_the_new_decider(model, tmp_path):
    folder = model.save_pretrained(tmp_path / "saved")
    (folder / "README.md").write_text("mine")
    model.save_pretrained(folder)
    assert (folder / "README.md").read_text() == "mine"
    (folder / "README.md").unlink()
    card = (model.save_pretrained(folder) / "README.md").read_text()
    other = rfdlc.Model.from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the card is still right
        other.save_pretrained(tmp_path / "same")
    other.decider = other.decider.replace(
        utility=rfdlc.Utility.one_hot(other.classes).with_abstain(0.7)
    )
    with pytest.warns(
        UserWarning,
        match=(
            r"README.md was kept, but is about other decisions: edit it, or delete it"
        ),
    ):
        other.save_pretrained(tmp_path / "costs")
    assert (tmp_path / "costs" / "README.md").read_text() == card
    model.save_pretrained(folder)
    assert (
        rfdlc.Decider.load(folder / "decider.json").model.decided_for
        == model.decider.model.decided_for
    )


def test_names_of_files_that_were_left_out_are_not_shared(tmp_path):
    lines = [f"{i},{i % 7},{'ab'[i % 2]}" for i in range(60)]
    (tmp_path / "t.csv").write_text("\n".join(["x,z,kind", *lines, "3,4,"]))
    data = rfdlc.load(tmp_path / "t.csv", target="kind", skip_broken=True)
    data = replace(
        data,
        skipped=(f'{tmp_path}/gone "x".png: the file does not exist',),
        notes=("a note",),
    )
    model = rfdlc.train(data, "ce", tmp_path / "run", epochs=1)
    assert "gone " in (model.path / "config.json").read_text()
    shared = json.loads(
        (model.save_pretrained(tmp_path / "saved") / "config.json").read_text()
    )
    assert shared["data"]["notes"] == ["a note", "broken, left out: 1"]
    own = json.loads((model.path / "config.json").read_text())
    assert {**own["data"], "notes": []} == {**shared["data"], "notes": []}
    assert str(tmp_path) not in json.dumps(shared)
    assert rfdlc.Model.from_pretrained(tmp_path / "saved").classes == model.classes


@pytest.mark.parametrize("described", [False, True])
def test_the_hub_gets_the_saved_files_and_keeps_its_card(model, monkeypatch, described):
    sent = {}

    class Api:
        def create_repo(self, name, **options):
            sent["created"] = name, options

        def file_exists(self, name, file):
            return described and (name, file) == ("me/digits", "README.md")

        def upload_folder(
            self, repo_id, folder_path, commit_message, ignore_patterns=None
        ):
            kept = [
                file
                for file in folder_path.iterdir()
                if file.name not in (ignore_patterns or ())
            ]
            sent["files"] = {file.name: file.read_bytes() for file in kept}
            return f"https://huggingface.co/{repo_id}"

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert model.push_to_hub("me/digits") == "https://huggingface.co/me/digits"
    assert sent["created"] == ("me/digits", {"private": True, "exist_ok": True})
    assert {"config.json", "model.safetensors", "decider.json"} <= set(sent["files"])
    assert ("README.md" in sent["files"]) != described
    assert described or b'from_pretrained("me/digits")' in sent["files"]["README.md"]


def test_the_hub_is_asked_for_the_files_of_a_model_alone(model, monkeypatch, tmp_path):
    folder, asked = model.save_pretrained(tmp_path / "saved"), {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, **more: asked.update(more, name=name) or folder,
    )
    loaded = rfdlc.Model.from_pretrained("me/digits", revision="v1")
    assert loaded.classes.names == model.classes.names
    assert asked == {
        "name": "me/digits",
        "revision": "v1",
        "allow_patterns": [*hub.NEEDED, *hub.OTHERS],
    }


def test_without_a_network_one_line_says_so(model, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        InputError, match=r"me/absent could not be loaded .*save_pretrained"
    ) as found:
        rfdlc.Model.from_pretrained("me/absent")
    assert "\n" not in str(found.value)
    with pytest.raises(InputError, match="me/digits could not be written") as found:
        model.push_to_hub("me/digits")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("name", ["absent", "../absent/run", "/absent/run", "a/b/c"])
def test_what_is_no_name_of_a_repository_is_refused(name):
    with pytest.raises(InputError, match="neither a folder nor OWNER/NAME"):
        rfdlc.Model.from_pretrained(name)


def test_a_run_without_weights_is_refused(model, tmp_path):
    with pytest.raises(InputError, match="no trained weights"):
        hub.copy_model(tmp_path, tmp_path / "saved")
