"""What options name by files or words: classes, class priors, utilities, experts, and
deciders of folders.
"""

import csv
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import rfdlc
from rfdlc.errors import InputError, expect, listing, repeated
from rfdlc.formats.files import read_json
from rfdlc.formats.tables import is_table

CLASSES = "classes.json"  # of a run folder
HELD_OUT = "held-out.npz"  # of a run folder
BUILDERS = ("one-hot", "tail-sensitive")
_NO_TABLES = (
    ".json",
    ".toml",
    ".yaml",
    ".yml",
    ".xlsx",
    ".xls",
    ".ods",
    ".parquet",
    ".npy",
    ".npz",
)
_CLASS_FILES = (
    ".json",
    ".csv",
    ".tsv",
    ".parquet",
    ".npz",
)  # what can tell the classes; other dots are in names


def with_expert(utility: "rfdlc.Utility", file: Path) -> "rfdlc.Utility":
    """The utility with an expert: a table of true classes and answers, and optionally a
    column of costs.
    """
    from rfdlc.formats.tables import CsvFile

    names, columns = utility.classes.names, CsvFile(file).names
    missing = [
        name for name in names if name not in columns
    ]  # told first: a utility may lack some
    expect(
        not missing,
        f"{file}: no column for the answer {listing(missing)}: expected one per class,"
        " and cost",
    )
    table = rfdlc.Utility.read_csv(file, utility.classes)
    given = list(table.actions)
    unknown = [name for name in given if name not in (*names, "cost")]
    expect(
        not unknown,
        f"{file}: column {listing(unknown)} is not a class: expected one answer per"
        " class, and cost",
    )
    cost = table.matrix[:, given.index("cost")] if "cost" in given else 0.0
    return utility.with_expert(
        file.stem, confusion=table.matrix[:, table.class_action], cost=cost
    )


def read_classes(spec: str) -> "rfdlc.Classes":
    """`cat,dog,newt`; a JSON file or a run folder; a CSV with columns
    class,count[,group]; or predictions.
    """
    from rfdlc.formats.tables import SUFFIXES, open_table

    path, ending = Path(spec), Path(spec).suffix.lower()
    if (path / CLASSES).is_file():  # of a run
        return rfdlc.Classes.from_json(path / CLASSES)
    if not path.is_file():
        named = "," in spec and ending not in _CLASS_FILES
        expect(
            named,
            f"classes {spec!r}: no such file; expected a file, a run folder, or names"
            " such as cat,dog,newt",
        )
        return rfdlc.Classes(
            tuple(
                name.strip() for name in next(csv.reader([spec], skipinitialspace=True))
            )
        )
    if ending == ".json":
        return rfdlc.Classes.from_json(path)
    try:
        if ending not in SUFFIXES or "class" not in open_table(path).names:
            return rfdlc.Predictions.load(path).classes
        columns = table_columns(path, "class")
        names, groups = columns["class"], dict[str, list[str]]()
        for name, group in zip(names, columns.get("group", ()), strict=False):
            if group:
                groups.setdefault(group, []).append(name)
        counts: Any = (
            tuple(
                _numbers(names, columns.get("count", ()), "count", whole=True).values()
            )
            or None
        )
        return rfdlc.Classes(tuple(names), counts, groups)
    except InputError as error:
        told = str(error).removeprefix(f"{path}: ")
        raise InputError(
            f"{path}: {told}; training counts are read from a CSV with columns"
            " class,count"
        ) from None


def read_prior(spec: str, what: str) -> str | dict[str, float]:
    """`uniform`, `train`, `cat=0.2,dog=0.8`, or a CSV file with a column class, and
    share or count: always by name.
    """
    if spec in ("uniform", "train", "estimate"):
        return spec
    if "=" in spec:
        odd = next((item.strip() for item in spec.split(",") if "=" not in item), None)
        fix = (
            "where names have commas, give a CSV file with the columns class and share"
            " (or count)"
        )
        expect(
            odd is None,
            f"{what} {spec!r}: {odd!r} has no share: expected shares such as"
            f" cat=0.2,dog=0.8; {fix}",
        )
        pairs = [item.partition("=") for item in spec.split(",")]
        return _numbers(
            [name.strip() for name, _, _ in pairs],
            [value for _, _, value in pairs],
            what,
        )
    expect(
        spec.lower().endswith((".csv", ".tsv")),
        f"{what} {spec!r} is unknown: expected uniform, train, estimate (a target prior"
        " alone), shares such as cat=0.2,dog=0.8, or a CSV file with columns"
        " class,share or class,count",
    )
    columns = table_columns(Path(spec), "class")
    kind = "count" if "count" in columns and "share" not in columns else "share"
    expect(
        kind in columns,
        f"{spec}: expected columns class,share or class,count and one row per class",
    )
    return _numbers(
        columns["class"], columns[kind], f"{spec}: {kind}", whole=kind == "count"
    )


def table_columns(path: Path, *needed: str) -> dict[str, list[str]]:
    """The cells of a small table as text, by column."""
    from rfdlc.formats.tables import read_columns

    found = {name: cells.to_pylist() for name, cells in read_columns(path).items()}
    columns = {
        name: ["" if cell is None else str(cell).strip() for cell in cells]
        for name, cells in found.items()
    }
    expect(
        all(map(columns.get, needed)),
        f"{path}: expected columns {', '.join(needed)} and one row per class",
    )
    return columns


def _numbers(
    names: Iterable[str], texts: Iterable[str], what: str, whole: bool = False
) -> dict[str, float]:
    """The number of each class; a whole one such as 12.000 may be meant as twelve
    thousand, and raises.
    """
    from rfdlc.formats.tables import is_number, number

    found: dict[str, float] = {}
    for name, text in zip(names, texts, strict=False):
        expect(
            name not in found,
            f"{what} of {name!r} is given twice: expected one for every class",
        )
        unclear = whole and re.fullmatch(r"[0-9]{1,3}([.,][0-9]{3})+", text)
        fix = "could be read in two ways: write it without a sign for thousands"
        expect(not unclear, f"{what} of {name!r}: {text!r} {fix}")
        expect(is_number(text), f"{what} of {name!r}: {text!r} is not a number")
        found[name] = number(text)
    return found


def read_utility(
    spec: str,
    classes: "rfdlc.Classes | None",
    penalty: float | None = None,
    costs: bool = False,
) -> "rfdlc.Utility":
    """The path of a CSV file, or `one-hot` or `tail-sensitive` for classes that are
    known.
    """
    allowed = penalty is None or spec == "tail-sensitive"
    expect(
        allowed,
        f"penalty {penalty} is for the utility tail-sensitive, not for {spec}: leave"
        " it out",
    )
    if spec not in BUILDERS:
        table = read_table(spec, costs, classes)
        utility = (
            rfdlc.Utility.from_costs(table.matrix, table.classes, table.actions)
            if costs
            else table
        )
        _warn_of_sign(spec, utility, costs)
        return utility
    if classes is None:
        raise InputError(
            f"utility {spec!r} needs the classes: give them with --classes"
        )
    if spec == "one-hot":
        return rfdlc.Utility.one_hot(classes)
    needs = (
        "utility 'tail-sensitive' needs training counts: give --classes FILE with"
        " columns class,count"
    )
    expect(classes.counts is not None, needs)
    return rfdlc.Utility.tail_sensitive(classes, -1.0 if penalty is None else penalty)


def read_table(
    spec: str, costs: bool, classes: "rfdlc.Classes | None" = None
) -> "rfdlc.Utility":
    """The numbers of a CSV file of utilities or `costs` as they are."""
    kind, others = (
        ("costs", "") if costs else ("utility", f" or one of {listing(BUILDERS)}")
    )
    expect(
        Path(spec).is_file(),
        f"{kind} {spec!r}: no such file; expected a CSV file{others}",
    )
    hint = "as `rfdlc utility new` writes one (a saved decider is given with --decider)"
    expect(
        Path(spec).suffix.lower() not in _NO_TABLES,
        f"{kind} {spec!r}: expected a CSV file, {hint}",
    )
    return rfdlc.Utility.read_csv(spec, classes)


def _warn_of_sign(spec: str, utility: "rfdlc.Utility", costs: bool) -> None:
    """Costs read as utilities, or the reverse, would silently lead to the worst
    decisions.
    """
    from rfdlc.decisions.decider import UPSIDE_DOWN

    own = utility.class_action
    among = utility.matrix[:, own]  # (C, C): what deciding for each class is worth
    right = among.diagonal()
    if utility.upside_down:
        warnings.filterwarnings(
            "ignore", message=re.escape(UPSIDE_DOWN)
        )  # said here of the file
        least = (
            "is worth the least of its row: if these are costs, give them with --costs"
        )
        most = (
            "costs the most of its row: if these are utilities, give them with"
            " --utility"
        )
        warnings.warn(
            f"{spec}: every right decision {most if costs else least}", stacklevel=2
        )
        return
    better = (among > right[:, None]) & (own >= 0) & (own >= 0)[:, None]
    for true, other in list(zip(*better.nonzero(), strict=True))[:1]:
        taken = (
            f"taking {utility.classes.names[true]!r} for"
            f" {utility.classes.names[other]!r}"
        )
        taken += " costs less" if costs else " is worth more"
        warnings.warn(
            f"{spec}: {taken} than being right: is its sign right?", stacklevel=2
        )


def warn_of_dominated_actions(utility: "rfdlc.Utility") -> None:
    for action, other in utility.dominated.items():
        told = (
            f"the action {action!r} will never be chosen: {other!r} is at least as good"
            " whatever the true class is"
        )
        warnings.warn(
            f"{told}; check their costs, or leave {action!r} out", stacklevel=2
        )


def group_column(folder: Path) -> tuple[str, str]:
    """The column that `--groups` named when a run was trained, and the table that it is
    in; texts are empty if unknown.

    Run folders have the numbers of groups alone.
    """
    if not (folder / "config.json").is_file():
        return "", ""
    data = read_json(folder / "config.json").get("data")
    found = data if isinstance(data, dict) else {}
    options, source = found.get("options"), str(found.get("source", ""))
    column = options.get("groups") if isinstance(options, dict) else None
    return str(column or ""), source if is_table(Path(source)) else ""


def paths_in(text: str) -> list[Path]:
    """Paths with commas between them, which names may have, too, as those of `rfdlc
    sweep`: the longest that exist.
    """
    parts, found, start = text.split(","), list[Path](), 0
    ends = [
        [end for end in range(at + 1, len(parts) + 1) if _exists(parts[at:end])]
        for at in range(len(parts))
    ]
    while start < len(parts):
        later = (
            at for at in range(start + 1, len(parts)) if ends[at]
        )  # of what is not there, up to what is
        end = max(ends[start]) if ends[start] else next(later, len(parts))
        found.append(Path(",".join(parts[start:end])))
        start = end
    return found


def _exists(parts: Sequence[str]) -> bool:
    return bool(parts[0]) and Path(",".join(parts)).exists()


def groups_of(predictions: "rfdlc.Predictions", told: str, table: str) -> Any:
    """The number of each sample's group, with a hint that leads to the names."""
    fix = f"--labels {table} has the names, if it is a table with ids and this column"
    if predictions.groups is None:
        raise InputError(f"{told}: the run has no groups of its test split: {fix}")
    warnings.warn(
        f"{told}: the run has numbers of groups, in the order of their names; {fix}",
        stacklevel=2,
    )
    return predictions.groups


def with_groups(
    predictions: "rfdlc.Predictions", column: str | None
) -> "rfdlc.Predictions":
    """With the groups that a column names, if it was read."""
    from rfdlc.probabilities.priors import as_groups

    if column in predictions.columns:
        cells: Any = predictions.columns[column]
        empty = [
            row
            for row, cell in enumerate(cells, start=1)
            if not str(cell or "").strip()
        ]
        expect(
            not empty,
            f"--groups: column {column!r} is empty in row {listing(empty[:3])}: fill"
            " it in",
        )
        predictions.groups = as_groups(cells, len(predictions))
        predictions.scores = replace(predictions.scores, groups=predictions.groups)
    return predictions


def check_groups(
    predictions: "rfdlc.Predictions", column: str | None, told: str
) -> None:
    """Raise for predictions that have no groups, if a column was to name them."""
    fix = (
        "give one with this column, or leave --groups out: then its samples count as"
        " independent"
    )
    expect(
        column is None or predictions.groups is not None,
        f"{told}: no column {column!r} for --groups; {fix}",
    )


def rows_of(
    ids: list[str], cells: list[str], told: str, skip: bool
) -> list[int | None]:
    """The row of each id, as it is or by the name of the file; None for ids without
    one, if some may be skipped.
    """
    for part in (str, os.path.basename):
        known, names = [part(name) for name in ids], [part(name) for name in cells]
        row_of = {name: row for row, name in enumerate(names)}
        absent = [name for name in known if name not in row_of]
        enough = not absent or (skip and len(absent) < len(known))
        if enough and len(row_of) == len(names) and len({*known}) == len({*ids}):
            return [row_of.get(name) for name in known]
    from rfdlc.probabilities.classes import SKIPPING_UNKNOWN

    wrong = (
        f"{'none' if absent else 'several'} for"
        f" {listing(absent or repeated(names) or repeated(known), 3)}"
    )
    some = 0 < len(absent) < len(known)
    raise InputError(
        f"{told}; {wrong}{f': leave them out with {SKIPPING_UNKNOWN}' if some else ''}"
    )


def with_labels(
    predictions: "rfdlc.Predictions", texts: Sequence[str], where: str, skip: bool
) -> "rfdlc.Predictions":
    """With labels by name, one per sample; without samples that have none, or of
    unknown classes, if they may be.
    """
    import numpy as np

    from rfdlc.probabilities.classes import labelled_places
    from rfdlc.probabilities.predictions import encode_targets

    ids: Any = predictions.ids
    kept = labelled_places(
        texts, predictions.classes, where, skip, lambda row: f"the row of {ids[row]}"
    )
    found = predictions if len(kept) == len(texts) else predictions.take(np.array(kept))
    found.targets, found.left_out = (
        encode_targets(np.array(texts)[kept], found.classes, where),
        len(texts) - len(kept),
    )
    return found


def folder_decider(path: Path) -> "rfdlc.Decider | None":
    """The decider that a folder of predictions brings along."""
    return rfdlc.Decider.load(path) if (path / "decider.json").is_file() else None


def held_out(run: Path) -> "rfdlc.Predictions | None":
    """Predictions of samples that the networks of a run folder have not been trained
    on, if it has them.
    """
    if not (run / HELD_OUT).is_file():
        return None
    return rfdlc.Predictions.load(held_out_file(run))


def held_out_file(source: Path) -> Path:
    """The file of held-out predictions: that of a run folder, or the source itself."""
    if not (source / HELD_OUT).is_file():
        if (source / "decider.json").is_file():
            raise InputError(
                f"{source}: has no held-out predictions ({HELD_OUT}): give predictions"
                " with labels of samples that it was not trained on (`rfdlc fit FILE"
                f" --decider {source}`)"
            )
        return source
    settings = dict[str, Any]()
    if (source / "config.json").is_file():
        settings = read_json(source / "config.json")["settings"]
    if (source / "tuning.json").is_file():
        settings |= read_json(source / "tuning.json").get("chosen", {})
    if settings.get("refit") and settings.get("warm_refit"):
        raise InputError(
            f"{source}: its networks were trained further on the samples of {HELD_OUT}"
            " (warm_refit=true), so that prices, thresholds and sets cannot be found"
            " on these: train with refit=false, or fit a decider to samples that they"
            f" have not seen (`rfdlc fit FILE --decider {source} -o decider.json`)"
        )
    return source / HELD_OUT
