"""What runs cost, in trainings of one network: for the estimate of a grid, and for a run's share of a stack's time."""

from collections.abc import Sequence
from typing import NamedTuple

from paper.grids import Grid, Wanted, run_settings
from rfdlc.errors import listing

LATE = ("weights", "utility", "penalty", "alpha")  # what the paper's method starts after `deferred`
SECONDS_A_NETWORK = 9  # ResNet-32, 200 epochs, in a stack on one H200: for the estimate alone


class Cost(NamedTuple):
    """Of a run alone, and in its stack, where it may share the beginning of another one."""

    alone: float
    here: float


def work(data_name: str, stack: Sequence[Wanted]) -> list[Cost]:
    """The cost of each run. Runs that differ only in what starts late share what comes before it."""
    from rfdlc.training.methods import resolve

    costs, begun = [], set()
    for run in stack:
        method, settings = resolve(run.method, data_name, run_settings(run))
        alone = method.relative_cost(settings.epochs) / method.settings.get("particles", 1) * settings.particles
        early = {key: value for key, value in run.settings.items() if key not in LATE or not settings.deferred}
        beginning = run.method, run.seed, run.hold_out, str(sorted(early.items()))
        costs.append(Cost(alone, alone * (1 - settings.deferred) if beginning in begun else alone))
        begun.add(beginning)
    return costs


def estimate(grid: Grid) -> list[tuple[str, int, float]]:
    """For each stack its runs, how many there are, and their work."""
    return [
        (title(stack), len(stack), sum(cost.here for cost in work(grid.data.source, stack))) for stack in grid.stacks
    ]


def title(stack: Sequence[Wanted]) -> str:
    """What a person reads of a stack."""
    return listing(dict.fromkeys(run.name for run in stack), 4)


def print_estimate(grid: Grid) -> None:
    """A line a stack, and the sum."""
    rows = estimate(grid)
    for runs, count, cost in rows:
        print(f"{count:4d} runs {cost:7.1f} network-trainings  {runs}")
    total = sum(cost for _, _, cost in rows)
    minutes = total * SECONDS_A_NETWORK / 60
    print(
        f"{grid.name}: {total:.0f} network-trainings, about {minutes:.0f} minutes of one H200 for ResNet-32, 200 epochs"
    )
