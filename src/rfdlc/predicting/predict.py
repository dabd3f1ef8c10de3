"""predict: predictions of any number of samples, written as they come; after a kill,
the same call continues.
"""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rfdlc.data.dataset import Split
from rfdlc.data.opening import Sources, image_paths
from rfdlc.data.readers.image_folder import common_folder
from rfdlc.data.registry import locate
from rfdlc.data.samples import Samples
from rfdlc.decisions.budgets import Budget, Worth, allotted
from rfdlc.decisions.decider import Decider, chosen_decider
from rfdlc.decisions.rules import EXPECTED_UTILITY, OVER_BUDGET, UNFAMILIAR, largest
from rfdlc.decisions.sets import set_texts
from rfdlc.decisions.unfamiliar import unfamiliar_action
from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, choose, expect, listing
from rfdlc.formats.files import replacing
from rfdlc.formats.resumable import ranks
from rfdlc.formats.tables import split_name
from rfdlc.predicting.parts import Computed, Parts, Report, TableStore
from rfdlc.probabilities.model import Probabilities
from rfdlc.probabilities.predictions import Predictions
from rfdlc.probabilities.priors import PriorEstimate, PriorLike
from rfdlc.probabilities.scores import (
    BY_MODEL,
    CORRECTED,
    DECIDED,
    DETAILS,
    KIND,
    RAW,
    Floats,
    check_class_names,
)
from rfdlc.training.building import OwnBackbone
from rfdlc.training.model import Model
from rfdlc.training.run import Run

KINDS = (".npz", ".parquet", ".csv")
MOST_ESTIMATED, BLOCKS = (
    20_000,
    20,
)  # samples from which a class prior is estimated, and where they are taken from
PART_ROWS, PART_VALUES = (
    4096,
    2**22,
)  # of a part, the smaller of the two: what a kill costs, and what is in memory
REPEATED = (
    "target",
    "action",
    "reason",
    KIND,
)  # columns of text with few different values
TEXTS = ("id", "set", *REPEATED)  # all other columns hold numbers


@dataclass(frozen=True)
class Predicted:
    """What was written."""

    path: Path
    samples: int  # rows of the file
    skipped: int  # broken samples that were left out
    decided_for: str  # the class prior, in words
    # False where other processes still have parts to do: the last one writes the file
    complete: bool = True
    skipped_file: Path | None = None  # names the broken samples
    actions: Mapping[str, int] = field(
        default_factory=dict
    )  # how often each is in the table that this process wrote
    budget: Budget | None = None  # that of the decider, where one was used
    handed_over: Mapping[str, float] = field(
        default_factory=dict
    )  # the shares of its names


def predict(
    run: str | Path,
    source: Sources,
    out: str | Path,
    *,
    split: str | None = None,
    root: str | Path | None = None,
    utility: Utility | None = None,
    target_prior: PriorLike | None = None,
    decider: Decider | None = None,
    raw: bool = False,
    keep: Sequence[str] = (),
    skip_broken: bool = False,
    allow_links: bool = False,
    backbone: OwnBackbone | None = None,
) -> Predicted:
    """Predict any number of samples in constant memory, and write one file; after a
    kill, the same call continues.

    Parameters
    ----------
    run, source
        The run folder; a folder or list of images, image files, a table, arrays, or the
        name of a data set.
    out
        `.parquet` or `.csv`: calibrated probabilities and the decided action. `.npz`:
        logits, computed in memory.
    split, root
        `train`, `val` or `test`, by default the last there is; the folder of the
        source, or of a list's images.
    utility, target_prior
        What a table is decided for, by default as the run; the prior "estimate" is
        estimated from these samples.
    decider
        Instead of these and of the run's own, for example `Decider.load(run)` with
        sets, or a budget: all samples are one batch, in which at most its share is
        handed over.
    raw
        Write the model's own probabilities to a table, for a decider to calibrate and
        correct later.
    keep
        Columns of a table that are copied to the result, such as the time of each
        sample.
    skip_broken, allow_links
        Leave out and list images that cannot be read; accept links that leave a folder
        of images.
    backbone
        The backbone of a run that was trained with one of your own.

    Returns
    -------
    Predicted
        The file and the number of samples in it.
    """
    path, kind = Path(out), choose("kind of file", Path(out).suffix.lower(), KINDS)
    asked = {
        "utility": utility,
        "target prior": target_prior,
        "decider (sets, budget, unfamiliar)": decider,
    }
    asked |= {"raw": raw, "keep": keep or None}
    world_size = ranks()[1]
    alone = world_size == 1 or kind == ".parquet"
    expect(
        alone,
        f"{world_size} processes write one file together in Parquet alone: choose"
        " .parquet",
    )
    given = listing(
        [
            name
            for name, value in asked.items()
            if value is not None and value is not False
        ]
    )
    logits = (
        f"{path}: an .npz file holds logits, not decisions, and takes no {given}: write"
        " a table, --out FILE.csv "
    )
    logits += (
        "or .parquet, or leave this out and decide the logits with `rfdlc decide"
        f" {path} --decider {run}`"
    )
    expect(not given or kind != ".npz", logits)
    model = Model.load(run, backbone=backbone, device=local_device())
    where: dict[str, Any] = {
        "split": split,
        "root": root,
        "allow_links": allow_links,
        "keep": keep,
    }
    try:
        samples = model.open_samples(source, skip_broken=skip_broken, **where)
    except InputError as error:
        raise InputError(
            f"{error}{_own_split(Run(run), source, root, split)}"
        ) from None
    warn_of_training(run, source, len(samples), root, split)
    decide_by(model, samples, utility, target_prior, decider)
    if kind == ".npz":
        return _write_logits(model, samples, path)
    table = Table(model, raw, samples, batch=True)
    job = {
        "model": _fingerprint(Path(run)),
        "source": samples.fingerprint,
        **table.described(),
    }
    store = TableStore(
        table.schema,
        kind,
        REPEATED,
        more=table.gains,
        settle=table.settle if table.gains else None,
    )
    parts = Parts(
        path,
        store,
        len(samples),
        max(1, min(PART_ROWS, PART_VALUES // len(table.schema))),
        job,
    )
    complete = parts.fill(partial(table.compute, samples), "Predicting")
    if cut := samples.cut_warning():
        warnings.warn(cut, stacklevel=2)
    skipped, listed = parts.skipped if complete else (0, None)
    actions = (
        {name: store.actions[name] for name in table.decider.utility.actions}
        if store.actions
        else {}
    )
    shares, told = shares_of(model.decider, actions), model.decider.model.decided_for
    return Predicted(
        path, len(samples) - skipped, skipped, told, complete, listed, actions, *shares
    )


def shares_of(
    decider: Decider, actions: Mapping[str, int]
) -> tuple[Budget | None, dict[str, float]]:
    """The budget of a decider, and the shares that were handed over, of the names of
    the budget.
    """
    budget = decider.deferral.budget if actions else None
    return budget, (
        {} if budget is None else budget.handed_over(actions, decider.utility)
    )


def _write_logits(model: Model, samples: Samples, path: Path) -> Predicted:
    found, names = model.predict_samples(samples), model.decider.utility.actions
    with replacing(path) as beside:
        found.save(beside)
    chosen = (
        model.decider.decide(found, batch=True)
        if len(found)
        else np.zeros(0, dtype=np.int64)
    )
    actions = dict(
        zip(names, np.bincount(chosen, minlength=len(names)).tolist(), strict=True)
    )
    shares, told = shares_of(model.decider, actions), model.decider.model.decided_for
    return Predicted(
        path, len(found), len(samples) - len(found), told, True, None, actions, *shares
    )


def warn_of_training(
    run: str | Path,
    source: Sources,
    count: int,
    root: str | Path | None = None,
    split: str | None = None,
) -> None:
    """Say how many of `count` samples the run was trained on."""
    if seen := trained_on(Run(run), source, root, split, count):
        fix = (
            "metrics on them are not those of new samples; predict a test split or new"
            " data to evaluate"
        )
        warnings.warn(
            f"{seen:,} of {count:,} samples were in the run's training data: {fix}",
            stacklevel=3,
        )


def trained_on(
    run: Run, source: Sources, root: str | Path | None, split: str | None, count: int
) -> int:
    """How many of `count` samples the run was trained or calibrated on, as their place
    tells: copies are not known.
    """
    data = run.metadata["data"]
    if "source" not in data:  # in memory
        return 0
    files, own = (
        image_paths(source, root),
        locate(data["source"], data.get("root")).resolve(),
    )
    inside = common_folder(files)[0] if files else locate(str(source), root).resolve()
    if not inside.is_relative_to(own):
        return 0
    below = inside.relative_to(own).parts  # a folder or table of one split, or nothing
    chosen = split_name(Path(below[0]).stem) if below else split
    if chosen in ("train", "val"):
        return min(count, data["fingerprint"]["samples"])
    tested = (
        run.read_json("metrics.json").get("test", {}).get("samples", 0)
        if run.finished
        else 0
    )
    whole = (
        not below and count >= data["fingerprint"]["samples"] + tested
    )  # a test split has no more than `tested`
    return int(data["fingerprint"]["samples"]) if whole else 0


def _own_split(
    run: Run, source: Sources, root: str | Path | None, split: str | None
) -> str:
    """Where the predictions of a test split are that the run itself has made of this
    source.
    """
    data, made = run.metadata["data"], (run.path / "predictions.npz").exists()
    if (
        split != "test"
        or not made
        or "source" not in data
        or not isinstance(source, str | Path)
    ):
        return ""
    if (
        locate(source, root).resolve()
        != locate(data["source"], data.get("root")).resolve()
    ):
        return ""
    told = (
        f"; the run held its test split out itself, and {run.path}/predictions.npz has"
        " the predictions of it"
    )
    return f"{told}: `rfdlc evaluate {run.path}` or `rfdlc decide {run.path}`"


class Table:
    """From samples to the columns of the file.

    If all samples are one `batch` with a budget, columns `gains` follow: what each
    action that hands over gains. From those of all samples, `settle` finds which are
    handed over.
    """

    def __init__(
        self,
        model: Model,
        raw: bool,
        samples: Samples | None = None,
        *,
        batch: bool = False,
    ) -> None:
        import pyarrow

        self.model, self.kind = model, RAW if raw else CORRECTED
        self.decider = decider = model.decider
        self.said = (
            RAW
            if raw
            else CORRECTED + decider.model.decided_for.removeprefix("decided")
        )
        if model.identity:
            self.said += f"{BY_MODEL}{model.identity}"
        plain = dict.fromkeys(
            ("calibrator", "train_prior", "target_prior", "sets", "budget")
        )
        self.written = decider.replace(**plain) if raw else decider
        matrix = (
            decider.utility.matrix
        )  # a product with the identity is left out: it is slow for many classes
        self.one_hot = decider.rule == "expected-utility" and np.array_equal(
            matrix, np.eye(len(matrix))
        )
        classes = model.classes.names
        given = {"reason": bool((decider.utility.decided_class < 0).any())}
        details = [
            name for name in DETAILS if given.get(name, decider.sets is not None)
        ]
        check_class_names(classes)
        some = samples is not None and bool((samples.labels >= 0).any())
        known = {"id": samples is not None and samples.named, "target": some}
        names = [
            name
            for name in ("id", *classes, "target", *DECIDED, *details, KIND)
            if known.get(name, True)
        ]
        prior = decider.model.train_prior if raw else decider.model.decided_prior
        carried = (
            None if prior is None else dict(zip(classes, prior.tolist(), strict=True))
        )
        kept = {} if samples is None or not len(samples) else samples.columns(range(1))
        clash = [name for name in kept if name in names and name != "id"]
        expect(
            not clash,
            f"column {listing(clash)} cannot be kept: predictions are written to a"
            " column of this name",
        )
        fields = [
            (name, pyarrow.string() if name in TEXTS else pyarrow.float32())
            for name in names
        ]
        fields += [
            (name, cells.type) for name, cells in kept.items() if name not in names
        ]
        scores = json.dumps({"scores": self.kind, "prior": carried}, ensure_ascii=False)
        self.schema = pyarrow.schema(fields, {"rfdlc.scores": scores})
        handing = (
            np.flatnonzero(decider.utility.decided_class < 0)
            if batch and decider.deferral.budget is not None
            else ()
        )
        self.gains = [
            pyarrow.field(f"rfdlc_gain {decider.utility.actions[a]}", pyarrow.float64())
            for a in handing
        ]

    def described(self) -> dict[str, Any]:
        """What the columns depend on beside the model and the samples."""
        prior = self.decider.model.decided_prior
        rounded = None
        if prior is not None:
            # An estimated prior has the rounding of the device.
            rounded = [float(f"{share:.4g}") for share in prior]
        table = self.decider.to_dict()
        model = table["model"]
        return {
            "prior": rounded,
            "utility": table["utility"],
            "calibrator": model["calibrator"],
            "combine": model["combine"],
            "weights": model["weights"],
            "rule": table["rule"],
            "sets": table["sets"],
            "budget": table["budget"],
            "unfamiliar": table["unfamiliar"],
            "columns": [*self.schema.names, *(field.name for field in self.gains)],
            "kind of scores": self.kind,
        }

    def compute(
        self, samples: Samples, parts: Sequence[range], report: Report
    ) -> Iterator[Computed]:
        """Each part as a `pyarrow.Table`, and what was wrong with the samples that were
        left out.
        """
        import pyarrow

        schema = pyarrow.schema([*self.schema, *self.gains], self.schema.metadata)
        for _, found in groupby(
            self.model.predict_pieces(samples, parts), lambda piece: piece[0]
        ):
            pieces, broken = [schema.empty_table()], list[str]()
            for _, predictions, piece in found:
                broken += piece.broken
                report(len(piece.split) + len(piece.broken))
                if predictions is not None:
                    columns = {
                        **piece.columns,
                        **self.columns(predictions),
                        "target": self._labels(piece.split),
                    }
                    pieces.append(
                        pyarrow.table(
                            {name: columns[name] for name in schema.names}, schema
                        )
                    )
            yield pyarrow.concat_tables(pieces), broken

    def _labels(self, split: Split) -> list[str | None]:
        """True classes, and None where they are not known."""
        names = self.model.classes.names
        return [names[label] if label >= 0 else None for label in split.labels.tolist()]

    def columns(self, found: Predictions) -> dict[str, Any]:
        """What is written for some samples."""
        corrected = np.asarray(self.decider.probabilities(found))
        written = (
            corrected
            if self.written is self.decider
            else np.asarray(self.written.probabilities(found))
        )
        chosen, values, reason = largest(corrected), corrected.max(axis=1), list[str]()
        gains = dict[str, Any]()
        if self.gains:
            chosen, values, reason, gained = self._kept(found, corrected)
            gains = dict(
                zip((field.name for field in self.gains), gained.T, strict=True)
            )
        elif not self.one_hot:
            strange = (
                self.decider.deferral.unfamiliar is not None
            )  # then logits are needed, too
            explained = (
                self.decider.explain(found)
                if strange
                else self.decider.explain_probabilities(corrected)
            )
            chosen, values, reason = (
                explained.action,
                explained.value,
                explained.reason.tolist(),
            )
        columns: dict[str, Any] = dict(
            zip(found.classes.names, written.T.astype(np.float32), strict=True)
        )
        columns |= {
            "action": [self.decider.utility.actions[i] for i in chosen],
            KIND: [self.said] * len(found),
        }
        columns |= {
            "expected_utility": np.asarray(values, dtype=np.float32),
            "id": found.ids,
            "reason": reason,
        }
        if self.decider.sets is not None:
            members = self.decider.sets.members(corrected, self.decider.utility)
            columns |= {
                "set": set_texts(members, found.classes),
                "set_size": members.sum(axis=1).astype(np.float32),
            }
        return {
            name: columns[name] for name in self.schema.names if name in columns
        } | gains

    def _kept(
        self, found: Predictions, corrected: Floats
    ) -> tuple[Any, Any, list[str], Floats]:
        """The best class of each sample, or the action that it gets as unfamiliar, and
        what handing it over gains.
        """
        utility, worth = self.decider.utility, Worth.of(self.decider.utility, corrected)
        probabilities = Probabilities(self.decider.model, found.scores)
        strange = self.decider.deferral.flags(probabilities, corrected)
        chosen = (
            np.where(strange, unfamiliar_action(utility, corrected), worth.kept)
            if strange.any()
            else worth.kept
        )
        worth.gains[strange] = -1.0
        values = np.einsum(
            "nc,nc->n", corrected.astype(np.float64), utility.matrix.T[chosen]
        )
        return chosen, values, np.where(strange, UNFAMILIAR, "").tolist(), worth.gains

    def settle(self, parts: Iterator[Any]) -> Callable[[Any], Any]:
        """A function that changes parts, each in turn, to what a budget leaves of them:
        at most its share.
        """
        import pyarrow

        def of(part: Any) -> Floats:
            return np.stack(
                [part[field.name].to_numpy() for field in self.gains], axis=1
            )

        utility = self.decider.utility
        budget = self.decider.deferral.budget
        assert budget is not None
        gains = np.concatenate([of(part) for part in parts])
        choice = allotted(budget, utility, gains)
        done = 0
        handing = np.array(utility.actions)[utility.decided_class < 0]

        def settled(part: Any) -> Any:
            nonlocal done
            own, gains = choice[done : done + len(part)], of(part)
            done, away = done + len(part), own >= 0
            reason = np.where(
                gains.max(axis=1) > 0,
                np.where(away, EXPECTED_UTILITY, OVER_BUDGET),
                part["reason"],
            )
            value = part["expected_utility"].to_numpy() + np.where(
                away, gains[np.arange(len(own)), own], 0
            )
            action = np.where(away, handing[own], part["action"])
            for name, cells in (
                ("action", action),
                ("expected_utility", value),
                ("reason", reason),
            ):
                place = part.schema.get_field_index(name)
                array = pyarrow.array(cells.tolist(), part.schema.field(name).type)
                part = part.set_column(place, part.schema.field(name), array)
            return part

        return settled


def decide_by(
    model: Model,
    samples: Samples,
    utility: Utility | None,
    prior: PriorLike | None,
    decider: Decider | None = None,
) -> None:
    """Give the model what was asked for of the three; the prior "estimate" is that of
    the samples.
    """
    estimated = decider is None and isinstance(prior, str) and prior == "estimate"
    given = _estimated_prior(model, samples) if estimated else prior
    model.decider = chosen_decider(model.decider, utility, given, decider)


def _estimated_prior(model: Model, samples: Samples) -> PriorEstimate:
    """The class prior of the samples; of many, from blocks that are spread evenly."""
    blocks = 1 if len(samples) <= MOST_ESTIMATED else BLOCKS
    size = min(len(samples), MOST_ESTIMATED) // blocks
    starts = np.linspace(0, len(samples) - size, blocks).astype(int).tolist()
    pieces = model.predict_pieces(
        samples, [range(start, start + size) for start in starts]
    )
    logits = [
        predictions.scores.values
        for _, predictions, _ in pieces
        if predictions is not None
    ]
    return model.decider.estimate_prior(np.concatenate(logits, axis=1), logits=True)


def local_device() -> str:
    """Under torchrun each process of a machine has a GPU of its own."""
    local, gpus = os.environ.get("LOCAL_RANK"), torch.cuda.device_count()
    return f"cuda:{int(local) % gpus}" if local is not None and gpus else "auto"


def _fingerprint(run: Path) -> str:
    """Of all that a run's predictions depend on."""
    weights = (
        "model.safetensors" if (run / "model.safetensors").exists() else "last.ckpt"
    )
    files = [
        run / name
        for name in (weights, "decider.json", "config.json", "familiarity.safetensors")
    ]
    return sha256(
        b"".join(file.read_bytes() for file in files if file.exists())
    ).hexdigest()[:32]
