"""train, resume, fork and train_many: from data and settings to run folders and
models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rfdlc.data.embedding import weights_of
from rfdlc.errors import REPLACE, InputError, expect, listing, repeated
from rfdlc.imports import trust
from rfdlc.probabilities.scores import check_class_names
from rfdlc.training.building import OwnBackbone, start_of
from rfdlc.training.config import TrainConfig
from rfdlc.training.distributed import (
    SINGLE,
    ProcessGroup,
    process_group,
    started_processes,
    under_torchrun,
)
from rfdlc.training.methods import resolve
from rfdlc.training.model import Model
from rfdlc.training.run import (
    Checkpoint,
    Run,
    data_of,
    describe_data,
    load_for,
    sizes_for,
)
from rfdlc.training.settings import TABULAR, settings_where
from rfdlc.training.trainer import Trainer
from rfdlc.training.tuning import check_tuning, tune

STARTS_NETWORK = settings_where(lambda setting: setting.starts_network)
FIXED_IN_FORKS = settings_where(
    lambda setting: setting.starts_network or setting.fixed_in_forks
)
OWN_PER_PROCESS = settings_where(lambda setting: setting.own_per_process)
LEADING = settings_where(lambda setting: setting.decides_defaults)
NO_TRIALS = {
    name: TrainConfig.model_fields[name].default
    for name in settings_where(lambda setting: setting.asks_for_trials)
}


@dataclass(frozen=True)
class RunSpec:
    """A run for `train_many` to train.

    Parameters
    ----------
    out, method, settings
        Its run folder, a name in `rfdlc.methods.METHODS`, and the settings that differ
        from its own and the preset's.
    """

    out: str | Path
    method: str = "rf-dlc"
    settings: Mapping[str, Any] = field(default_factory=dict)


def train(
    data: Any,
    method: str = "rf-dlc",
    out: str | Path = "runs/rf-dlc",
    *,
    root: str | Path | None = None,
    data_options: Mapping[str, Any] | None = None,
    backbone: OwnBackbone | str | None = None,
    **settings: Any,
) -> Model:
    """Train a model, and keep everything in a run folder. What cannot be used raises an
    InputError before there is one.

    Parameters
    ----------
    data, root, data_options
        A Dataset, or what `rfdlc.load` takes: a name, a path, or arrays, with its root
        and its options.
    method, out
        A name in `rfdlc.methods.METHODS`, and the run folder to make. One that holds a
        run already is refused.
    backbone
        A name, `"timm:NAME"` for a network of timm; or a module that maps a batch to
        features, or a function that makes one, itself or as text
        `"package.module:function"`. A module or function itself must be passed again to
        `Model.load` and `resume`.
    **settings
        Settings of a `TrainConfig`. They override those of the data set's preset and of
        the method.

    Returns
    -------
    Model

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> train("digits-lt", "ce", f"{mkdtemp()}/run", epochs=2, seed=1).config.epochs
    2
    """
    own = None if isinstance(backbone, str) else backbone
    if backbone is not None:
        settings["backbone"] = backbone if own is None else "own"
    specs = [RunSpec(out, method, settings)]
    with process_group() as group:
        trainer, runs = prepare_runs(
            data, specs, root, data_options or {}, own, group, again=False
        )
        tune(trainer, runs[0])
        return trainer.fit(runs)[0]


def resume(
    path: str | Path, data: Any = None, *, backbone: OwnBackbone | None = None
) -> Model:
    """Continue a training from its last checkpoint, or finish what was left undone
    after it.

    Parameters
    ----------
    path
        A run folder.
    data, backbone
        Only for a run on data in memory, or with a function or module as its backbone:
        the same again.

    Returns
    -------
    Model
        Bit for bit what an undisturbed training gives on the same machine.
    """
    with process_group() as group:
        with group.raising_together():
            run = Run(path, group.main)
            trainer = Trainer(data_of(run, data), backbone=backbone, group=group)
            trainer.check(run)
        tune(trainer, run)
        return trainer.fit([run])[0]


def fork(
    path: str | Path,
    out: str | Path,
    *,
    at: int | None = None,
    method: str | None = None,
    data: Any = None,
    backbone: OwnBackbone | str | None = None,
    **changes: Any,
) -> Model:
    """Continue from a checkpoint of another run in a new folder, with other settings or
    as another method.

    Parameters
    ----------
    path, out, data, backbone
        The folder of the other run, and the folder to make; data and backbone as in
        `resume`.
    at
        The epoch of a kept checkpoint (setting `keep`); by default the last checkpoint.
    method, **changes
        Another method (`crt` from the end of `ce`, `ldam-drw` from the late epoch of
        `ldam`), and settings that differ.

    Returns
    -------
    Model
    """
    own = None if isinstance(backbone, str) else backbone
    changes |= {"backbone": backbone} if isinstance(backbone, str) else {}
    trust(changes.get("backbone"))
    with process_group() as group:
        with group.raising_together():
            source, run = Run(path), Run(out, group.main)
            _check_new([run])
            run.start = source.start
            checkpoint = _configure_fork(run, source, at, method, changes)
            trainer = Trainer(data_of(source, data), backbone=own, group=group)
            trainer.check(run)
            origin = {"path": str(source.path), "epoch": checkpoint.epoch}
            origin["changes"] = {name: str(value) for name, value in changes.items()}
            kept = {file.name: file for file in source.path.glob("embedding.*")}
            run.create(
                source.metadata["data"], source.classes, kept, forked_from=origin
            )
            if run.checkpoint() is None:
                run.save_checkpoint(checkpoint)
        return trainer.fit([run])[0]


def train_many(
    data: Any,
    specs: Sequence[RunSpec],
    *,
    root: str | Path | None = None,
    data_options: Mapping[str, Any] | None = None,
    networks: int = 24,
) -> list[Model]:
    """Train many runs on the same data, in as few stacks of networks as possible.

    Each folder ends up as `rfdlc.train` would have left it. What runs have in common at
    the beginning is trained once. After an interruption, make the same call again:
    finished runs are loaded, unfinished ones continued.

    Parameters
    ----------
    data, root, data_options
        As in `rfdlc.train`.
    specs, networks
        The runs, each with a folder of its own; the largest number of networks
        (particles of all runs) of a stack.

    Returns
    -------
    list of Model

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> specs = [
    ...     RunSpec(f"{mkdtemp()}/run", "ce", {"seed": seed, "epochs": 2})
    ...     for seed in (0, 1)
    ... ]
    >>> [model.config.seed for model in train_many("digits-lt", specs)]
    [0, 1]
    """
    count, folders = (
        started_processes(),
        repeated(str(Path(spec.out).resolve()) for spec in specs),
    )
    expect(
        count == 1,
        f"train_many uses one process, but {count} were started: leave torchrun out",
    )
    expect(
        networks >= 1, f"networks is {networks}: expected 1 or more networks per stack"
    )
    expect(
        not folders,
        f"{listing(folders)} is the folder of several runs: expected one folder"
        " per run",
    )
    trainer, runs = prepare_runs(
        data, without_trials(specs), root, data_options or {}, networks=networks
    )
    models = {
        run.path: Model.load(run.path, device=run.config.device)
        for run in runs
        if run.finished
    }
    models |= {
        model.path: model
        for model in trainer.fit([run for run in runs if run.path not in models])
    }
    return [models[run.path] for run in runs]


def prepare_runs(
    data: Any,
    specs: Sequence[RunSpec],
    root: str | Path | None,
    options: Mapping[str, Any],
    backbone: OwnBackbone | None = None,
    group: ProcessGroup = SINGLE,
    networks: int = 24,
    again: bool = True,
) -> tuple[Trainer, list[Run]]:
    """A trainer and its runs in their folders. What cannot be used raises before there
    is one.
    """
    with group.raising_together():
        runs = [Run(spec.out, group.main) for spec in specs]
        if not again:
            _check_new(runs)
        for spec in specs:
            trust(spec.settings.get("backbone"))
        # a wrong setting, network or file of weights raises before any work
        early = [
            resolve(spec.method, data if isinstance(data, str) else "", spec.settings)[
                1
            ]
            for spec in specs
        ]
        networks_of = [
            str([getattr(config, name) for name in STARTS_NETWORK]) for config in early
        ]
        known = {
            key: start_of(config, backbone)
            for key, config in dict(zip(networks_of, early, strict=True)).items()
        }
        starts = [known[key] for key in networks_of]
        apart = (
            "these networks expect images of different sizes or scales: train each of"
            " them in a call of its own"
        )
        pairs, drop = zip(early, starts, strict=True), options.get("drop")
        views = [
            (start.preprocessing, sizes_for(data, root, config, start, drop))
            for config, start in pairs
        ]
        expect(all(view == views[0] for view in views), apart)
        given, options = load_for(data, root, options, early[0], starts[0])
        check_class_names(given.classes.names)
        trainer = Trainer(given, backbone=backbone, group=group, networks=networks)
        for run, spec, start in zip(runs, specs, starts, strict=True):
            run.method_name, run.start = spec.method, start.weights
            calibrated_apart = (
                given.val is not None
            )  # then there is nothing to refit on
            usual = start.usual | ({"refit": False} if calibrated_apart else {})
            several = (
                not group.single and given.suits == "table"
            )  # trees are fitted by one process
            usual |= {"backbone": "mlp"} if several else {}
            chosen = {**usual, **spec.settings, **start.settings}
            run.config = resolve(
                spec.method, given.name, chosen, given.suits, len(given.train)
            )[1]
            run.config = check_tuning(trainer, run, spec.settings)
            trainer.check(run)
        described, copies = (
            describe_data(given, data, root, options),
            weights_of(given.embedding),
        )
    own = {
        key: value
        for key, value in runs[0].config.to_dict().items()
        if key not in OWN_PER_PROCESS
    }
    group.expect_same(
        {"method": runs[0].method_name, **own, "data": described["fingerprint"]}
    )
    with group.raising_together():
        for run, spec in zip(runs, specs, strict=True):
            more = (
                {"given": sorted(spec.settings)} if run.config.tuned else {}
            )  # which trials leave as they are
            run.create(described, given.classes, copies, **more)
    return trainer, runs


def _check_new(runs: Sequence[Run]) -> None:
    """Raise for a folder that holds a run, before data are read; processes that
    torchrun restarts continue theirs.
    """
    for run in runs:
        known = (
            f"{run.path} holds a run already: continue it with `rfdlc resume"
            f" {run.path}`"
        )
        taken = run.writes and run.exists and not under_torchrun()
        expect(
            not taken,
            f"{known} (in Python rfdlc.resume), choose another folder, or replace it"
            f" ({REPLACE})",
        )


def without_trials(specs: Sequence[RunSpec]) -> list[RunSpec]:
    """The same runs, also where a preset has trials; raises where the user asks for
    them.
    """
    alone = (
        "tune and budget are for a run that is trained alone: use train, or leave"
        " them out"
    )
    expect(not any(_asks_for_trials(spec.settings) for spec in specs), alone)
    return [replace(spec, settings={**spec.settings, **NO_TRIALS}) for spec in specs]


def _asks_for_trials(settings: Mapping[str, Any]) -> bool:
    return TrainConfig(
        **{name: settings[name] for name in NO_TRIALS if name in settings}
    ).tuned


def _configure_fork(
    run: Run,
    source: Run,
    at: int | None,
    method: str | None,
    changes: Mapping[str, Any],
) -> Checkpoint:
    """Give the run its method and config: its method's for these data, what the user
    had set, and the changes.
    """
    run.method_name, old, data = (
        method or source.method_name,
        source.config,
        source.metadata["data"],
    )
    fits = run.method.combination is source.method.combination
    expect(
        fits,
        f"a fork cannot continue as {method}: its networks have other parts; start a"
        " new run",
    )
    epochs = (
        f"{source.path} is a {old.backbone} run, which has no epochs to continue from"
    )
    expect(old.backbone not in TABULAR, f"{epochs}: start a new run with backbone=mlp")
    name, kind = data["name"], "images" if len(data["input_shape"]) == 3 else "table"
    before = {"preset": old.preset}
    plain = resolve(source.method_name, name, before, kind)[1]
    leading = {
        name: getattr(old, name)
        for name in LEADING
        if getattr(old, name) != getattr(plain, name)
    }
    usual = resolve(source.method_name, name, {**before, **leading}, kind)[1].to_dict()
    chosen = {
        key: value
        for key, value in old.to_dict().items()
        if value != usual[key] and key != "method_options"
    }
    chosen |= leading
    known, usual_options = run.method.options, usual["method_options"]
    chosen |= {
        key: value
        for key, value in old.method_options.items()
        if key in known and value != usual_options[key]
    }
    apart = "a fork continues a training and has no trials: leave tune and budget out"
    expect(not _asks_for_trials(changes), apart)
    chosen |= NO_TRIALS
    run.config = resolve(run.method_name, name, {**before, **chosen, **changes}, kind)[
        1
    ]
    moved = [
        name
        for name in FIXED_IN_FORKS
        if getattr(old, name) != getattr(run.config, name)
    ]
    expect(
        not moved,
        f"a fork cannot change {', '.join(moved)}: its checkpoint depends on them;"
        " start a new run",
    )
    checkpoint = source.checkpoint("last.ckpt" if at is None else f"epoch-{at}.ckpt")
    if checkpoint is None:
        kept = sorted(
            int(file.stem.removeprefix("epoch-"))
            for file in source.path.glob("epoch-*.ckpt")
        )
        missing = f"{source.path} has no checkpoint" + (
            "" if at is None else f" at epoch {at}"
        )
        fix = (
            f"choose one of them, or continue the run with `rfdlc resume {source.path}`"
        )
        raise InputError(f"{missing}: kept are {listing(kept) or 'none'}; {fix}")
    reached = (
        f"the epoch of the checkpoint of {source.path}, which is {checkpoint.epoch}"
    )
    fix = (
        f"epochs={run.config.epochs} is less than {reached}: expected more, or an"
        " earlier checkpoint"
    )
    expect(checkpoint.epoch <= run.epochs, fix)
    return checkpoint
