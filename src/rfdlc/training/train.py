"""train, resume, fork and train_many: from data and settings to run folders and models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rfdlc.data.dataset import Dataset
from rfdlc.data.load import load
from rfdlc.decide.classes import Classes
from rfdlc.errors import InputError, expect
from rfdlc.training.assembly import OwnBackbone
from rfdlc.training.config import TrainConfig
from rfdlc.training.distributed import SINGLE, ProcessGroup, process_group, started_processes, under_torchrun
from rfdlc.training.methods import find_method, resolve
from rfdlc.training.model import Model, new_decider
from rfdlc.training.run import Run, data_of, describe_data
from rfdlc.training.trainer import Trainer

FIXED_IN_FORKS = "backbone", "widths", "particles", "shared_stages", "head", "seed", "hold_out", "refit", "optimiser"
MAY_CHANGE = ("device", "workers", "compile")  # between the calls of train_many that train a run


def train(
    data: Any, method: str = "rf-dlc", out: str | Path = "runs/rf-dlc", *, root: str | Path | None = None,
    data_options: Mapping[str, Any] | None = None, backbone: OwnBackbone | str | None = None, **settings: Any,
) -> Model:  # fmt: skip
    """Train a model; everything is kept in a run folder.

    Parameters
    ----------
    data, root, data_options
        A Dataset, or what `rfdlc.load` takes: a name, a path, or arrays, with its root and its options.
    method, out
        A name in `rfdlc.methods.METHODS`, and the run folder to make. One that holds a run already is refused.
    backbone
        A name; a function that makes a module which maps a batch to features, itself or as
        `"package.module:function"`; or such a module. Unless it is given by name or import path, it must be passed
        again to `Model.load` and `resume`.
    **settings
        Settings of a `TrainConfig`. They override those of the data set's preset and of the method.

    Returns
    -------
    Model
        Trained and calibrated.

    Raises
    ------
    InputError
        For data, settings or a folder that cannot be used; nothing is written then.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> model = train("digits-lt", "ce", f"{mkdtemp()}/run", epochs=2, seed=1)
    >>> model.config.epochs, len(model.classes)
    (2, 10)
    """
    network = None if isinstance(backbone, str) else backbone
    if backbone is not None:
        settings["backbone"] = "own" if network is not None else backbone
    with process_group() as group:
        with group.raising_together():
            resolve(method, data if isinstance(data, str) else "", settings)  # a wrong setting raises before any work
            given, description = _load(data, root, data_options)
            trainer = Trainer(given, backbone=network, group=group)
            config = trainer.configure(out, method, settings)
            run = _create_run(out, method, config, description, given.classes, group)
        return trainer.fit([trainer.restore(run)])[0]


def resume(path: str | Path, data: Any = None, *, backbone: OwnBackbone | None = None) -> Model:
    """Continue a training from its last checkpoint, or finish what was left undone after it.

    Parameters
    ----------
    path
        A run folder.
    data, backbone
        Only for a run on data in memory, or with a function or module as its backbone: the same again.

    Returns
    -------
    Model
        Bit for bit what an undisturbed training gives on the same machine.

    Raises
    ------
    InputError
        If the folder does not hold a run, or the data are others.
    """
    with process_group() as group:
        with group.raising_together():
            run = Run(path, group.main)
            trainer = Trainer(data_of(run, data), backbone=backbone, group=group)
            trainer.check_processes(run.config)
        return trainer.fit([trainer.restore(run)])[0]


def fork(
    path: str | Path, out: str | Path, *, at: int | None = None, method: str | None = None, data: Any = None,
    backbone: OwnBackbone | str | None = None, **changes: Any,
) -> Model:  # fmt: skip
    """Continue from a checkpoint of another run in a new folder, with other settings or as another method.

    Parameters
    ----------
    path, out, data, backbone
        The folder of the other run, and the folder to make; data and backbone as in `resume`.
    at
        The epoch of a kept checkpoint (setting `keep`); by default the last checkpoint.
    method, **changes
        Another method, with its settings: `crt` from the end of `ce`, `ldam-drw` from the late epoch of `ldam`; and
        settings that differ from the other run's.

    Returns
    -------
    Model

    Raises
    ------
    InputError
        If there is no such checkpoint, or it cannot continue with these settings.
    """
    network = None if isinstance(backbone, str) else backbone
    if isinstance(backbone, str):
        changes["backbone"] = backbone
    with process_group() as group:
        with group.raising_together():
            _create_fork(Run(path), out, at, method, changes, group)
        return resume(out, data, backbone=network)


@dataclass(frozen=True)
class RunSpec:
    """A run for `train_many` to train.

    Parameters
    ----------
    out, method, settings
        Its run folder, a name in `rfdlc.methods.METHODS`, and the settings that differ from its own and the preset's.
    """

    out: str | Path
    method: str = "rf-dlc"
    settings: Mapping[str, Any] = field(default_factory=dict)


def train_many(
    data: Any, specs: Sequence[RunSpec], *, root: str | Path | None = None,
    data_options: Mapping[str, Any] | None = None, networks: int = 24,
) -> list[Model]:  # fmt: skip
    """Train many runs on the same data, in as few stacks of networks as possible.

    Each folder ends up as `rfdlc.train` would have left it. Runs whose shapes agree train side by side; what runs have
    in common at the beginning is trained once. Finished runs are loaded and unfinished ones continued: after an
    interruption, make the same call again.

    Parameters
    ----------
    data, root, data_options
        As in `rfdlc.train`.
    specs, networks
        The runs, each with a folder of its own; the largest number of networks (particles of all runs) of a stack.

    Returns
    -------
    list of Model
        In the order of `specs`.

    Raises
    ------
    InputError
        For settings that cannot be used, or a folder that holds another run; nothing is trained then.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> specs = [RunSpec(f"{mkdtemp()}/run", "ce", {"seed": seed, "epochs": 2}) for seed in (0, 1)]
    >>> [model.config.seed for model in train_many("digits-lt", specs)]
    [0, 1]
    """
    count, folders = started_processes(), [Path(spec.out).resolve() for spec in specs]
    expect(count == 1, f"train_many uses one process, but {count} were started: leave torchrun out")
    expect(networks >= 1, f"networks is {networks}: expected 1 or more networks per stack")
    for spec, folder in zip(specs, folders, strict=True):
        once = folders.count(folder) == 1
        expect(once, f"{spec.out} is the folder of several runs: expected one folder per run")
        resolve(spec.method, data if isinstance(data, str) else "", spec.settings)
    given, description = _load(data, root, data_options)
    trainer = Trainer(given, networks=networks)
    runs = [Run(spec.out) for spec in specs]
    configs = [trainer.configure(spec.out, spec.method, spec.settings) for spec in specs]
    for run, spec, config in zip(runs, specs, configs, strict=True):
        if run.exists:
            data_of(run, given)
            others = [name for name, value in config if name not in MAY_CHANGE and getattr(run.config, name) != value]
            what = ", ".join(others) or (run.method_name != spec.method and f"method {run.method_name}")
            expect(not what, f"{spec.out} holds another run (it differs in {what}): choose another folder")
    models: dict[Path, Model] = {}
    for run, spec, config in zip(runs, specs, configs, strict=True):
        if (run.path / "metrics.json").exists():  # written last
            models[run.path] = Model.load(run.path, device=config.device)
            continue
        if not run.exists:
            _create_run(spec.out, spec.method, config, description, given.classes, SINGLE)
        run.config = config
        run.restore()
    unfinished = [run for run in runs if run.path not in models]
    models |= {run.path: model for run, model in zip(unfinished, trainer.fit(unfinished), strict=True)}
    return [models[run.path] for run in runs]


def _load(data: Any, root: str | Path | None, options: Mapping[str, Any] | None) -> tuple[Dataset, dict[str, Any]]:
    """The data, and what a run folder keeps of them."""
    options, loaded = options or {}, isinstance(data, Dataset)
    late = f"a Dataset is loaded already: give data_options ({', '.join(options)}) to rfdlc.load"
    expect(not (loaded and options), late)
    given: Dataset = data if loaded else load(data, root=root, **options)
    return given, describe_data(given, data, root, options)


def _create_run(
    out: str | Path, method: str, config: TrainConfig, data: Mapping[str, Any], classes: Classes, group: ProcessGroup,
    **more: Any,
) -> Run:  # fmt: skip
    """A run in a new folder. A command that torchrun starts again finds its folder and continues."""
    new_decider(method, config, classes)  # refuses a target prior that does not fit before there is a folder
    metadata = {"method": method, "settings": config.to_dict(), "data": data, **more}
    if group.main and not (under_torchrun() and Run(out).matches(metadata)):
        Run.create(out, metadata, classes)
    return Run(out, group.main)


def _create_fork(
    source: Run, out: str | Path, at: int | None, method: str | None, changes: Mapping[str, Any], group: ProcessGroup
) -> None:
    """A folder with the other run's checkpoint in it."""
    row = find_method(method or source.method_name)
    fits = row.combination is source.method.combination
    expect(fits, f"a fork cannot continue as {method}: its networks have other parts; start a new run")
    old, data = source.config, source.metadata["data"]
    if method is None:
        new = row.configure({**old.to_dict(), **changes})
    else:  # the other method's config for these data, with what the user had set
        name, kind = data["name"], "images" if len(data["input_shape"]) == 3 else "features"
        usual = resolve(source.method_name, name, {}, kind)[1].to_dict()
        chosen = {key: value for key, value in old.to_dict().items() if value != usual[key]}
        new = resolve(method, name, {**chosen, **changes}, kind)[1]
    moved = [name for name in FIXED_IN_FORKS if getattr(old, name) != getattr(new, name)]
    expect(not moved, f"a fork cannot change {', '.join(moved)}: its checkpoint depends on them; start a new run")
    checkpoint = source.checkpoint("last.ckpt" if at is None else f"epoch-{at}.ckpt")
    if checkpoint is None:
        kept = sorted(file.stem.removeprefix("epoch-") for file in source.path.glob("epoch-*.ckpt"))
        raise InputError(f"{source.path} has no checkpoint at epoch {at}: kept are {', '.join(kept) or 'none'}")
    epoch = checkpoint.epoch
    early = f"epochs={new.epochs} is less than the epoch of the checkpoint of {source.path}, which is {epoch}"
    expect(epoch <= sum(row.stage_epochs(new)), f"{early}: expected more, or an earlier checkpoint")
    origin = {"path": str(source.path), "epoch": epoch, "changes": {k: str(v) for k, v in changes.items()}}
    name = method or source.method_name
    run = _create_run(out, name, new, data, source.classes, group, forked_from=origin)
    if run.checkpoint() is None:
        run.save_checkpoint(checkpoint)
