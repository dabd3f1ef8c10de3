"""Run folders for others: the files that a model needs, from a folder or from a
repository of the Hugging Face hub.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rfdlc.decisions.decider import Decider
from rfdlc.errors import InputError, expect
from rfdlc.evaluation.evaluate import evaluate
from rfdlc.probabilities.predictions import Predictions

# All that `Model.load` reads, and what people look for; no checkpoints, predictions or
# training samples.
NEEDED = ("config.json", "classes.json", "model.safetensors", "decider.json")
OTHERS = (
    "embedding.*",
    "familiarity.*",
    "tuning.json",
    "environment.json",
    "metrics.json",
    "choice.json",
    "README.md",
)
NAMED_BROKEN = re.compile(
    r'("broken, left out: \d+): (?:[^"\\]|\\.)*"'
)  # a note in JSON
DECIDES = (
    "It takes the actions of highest expected utility, {decider.utility!r}, and"
    " {decider.model.decided_for}."
)
CARD = f"""---
library_name: rfdlc
tags: [rfdlc, long-tailed, cost-sensitive, calibration]
---

# {{name}}

A calibrated ensemble for {{classes}} classes: \
`rfdlc.Model.from_pretrained("{{name}}")`.
{DECIDES}
Safetensors and JSON only: loading runs no code of this folder.
"""


def model_card(name: str, run: Path, decider: Decider) -> str:
    """The README.md of a model: how it decides, and metrics of that on the test samples
    of its run.
    """
    text = CARD.format(name=name, decider=decider, classes=len(decider.utility.classes))
    tested = run / "predictions.npz"
    found = Predictions.load(tested) if tested.exists() else None
    if found is None or found.targets is None:
        return text
    return (
        f"{text}\nOn the test samples of the"
        f" run:\n\n```\n{evaluate(found, decider=decider)}\n```\n"
    )


def tells_otherwise(card: Path, decider: Decider) -> bool:
    """Whether a card of `model_card`, which people may have edited since, is about
    other decisions.
    """
    text = card.read_text(encoding="utf-8", errors="replace")
    return (
        DECIDES.partition("{")[0] in text
        and DECIDES.format(decider=decider) not in text
    )


def copy_model(run: Path, folder: Path) -> None:
    """Copy the files of a model into a folder, which is made; other files in it
    stay.
    """
    kept = [file for pattern in (*NEEDED, *OTHERS) for file in run.glob(pattern)]
    expect(
        (run / "model.safetensors").exists(),
        f"{run} has no trained weights yet: resume the run first",
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in kept:
            edited = file.name == "README.md" and (folder / file.name).exists()
            if folder.resolve() != run.resolve() and not edited:
                shutil.copyfile(file, folder / file.name)
                if (
                    file.name == "config.json"
                ):  # names of files that were left out may be paths of this machine
                    text = NAMED_BROKEN.sub(r'\1"', file.read_text(encoding="utf-8"))
                    (folder / file.name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({error.strerror}): choose another folder"
        ) from None


def fetched(name: str | Path, revision: str | None = None) -> Path:
    """The folder of a model: a local one as it is, or OWNER/NAME of the hub, downloaded
    or from its cache.
    """
    if Path(name).is_dir():
        return Path(name)
    allowed = f"{name!r} is neither a folder nor OWNER/NAME of a repository"
    expect(
        isinstance(name, str)
        and name.count("/") == 1
        and not name.startswith((".", "/")),
        allowed,
    )
    with _hub(f"{name} could not be loaded") as hub:
        return Path(
            hub.snapshot_download(
                name, revision=revision, allow_patterns=[*NEEDED, *OTHERS]
            )
        )


def upload(folder: Path, repository: str, private: bool, message: str) -> str:
    """Create a repository of the hub if there is none, upload the files of a folder,
    and return the address.
    """
    with _hub(f"{repository} could not be written") as hub:
        hub.HfApi().create_repo(repository, private=private, exist_ok=True)
        kept = (
            ["README.md"] if hub.HfApi().file_exists(repository, "README.md") else None
        )  # people edit it there
        given = {
            "repo_id": repository,
            "folder_path": folder,
            "commit_message": message,
            "ignore_patterns": kept,
        }
        return str(hub.HfApi().upload_folder(**given))


@contextmanager
def _hub(failed: str) -> Iterator[Any]:
    """The package huggingface_hub; whatever goes wrong in it ends in one line."""
    try:
        import huggingface_hub
    except ImportError:
        raise InputError(f'{failed}: pip install "rfdlc[hub]"') from None
    try:
        yield huggingface_hub
    except Exception as error:  # its errors have no common class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        fix = (
            "check the name, the connection and `hf auth login`; a folder that"
            " save_pretrained wrote needs no network"
        )
        raise InputError(f"{failed} ({reason}): {fix}") from None
