"""Grids: what they name, that shared runs have one name, and the variants of data."""

import numpy as np
import pytest

from paper import grids
from paper.experiments import estimate
from paper.grids import Source, Wanted, thinned, without_shared_groups
from paper.specs import SPECS
from rfdlc.data.dataset import Dataset, Split
from rfdlc.errors import InputError


def made(counts, groups=None):
    """A data set of these training counts; groups by split."""
    labels = np.repeat(np.arange(len(counts)), counts)
    few = np.arange(len(counts)).repeat(2)
    rng = np.random.default_rng(0)
    splits = {
        name: Split(
            rng.normal(size=(len(y), 3)).astype(np.float32),
            y,
            groups=None if groups is None else groups[name],
        )
        for name, y in (("train", labels), ("val", few), ("test", few))
    }
    return Dataset.of("made", [str(c) for c in range(len(counts))], splits)


@pytest.mark.parametrize("name", grids.names())
def test_every_grid_reads_and_can_be_estimated(name):
    grid = grids.read(name)
    work = estimate(grid)
    assert sum(count for _, count, _ in work) == sum(
        len(stack) for stack in grid.stacks
    )
    assert all(cost > 0 for _, _, cost in work)


def test_what_starts_late_costs_only_the_end():
    runs = (
        Wanted("rf-dlc-paper", {}, 0),
        Wanted("rf-dlc-paper", {"utility": "tail-sensitive-by-rank"}, 0),
    )
    made = grids.Grid("made", Source(source="cifar100-lt", name="made"), (runs,))
    assert [work for _, _, work in estimate(made)] == [pytest.approx(3 + 0.2 * 3)]


def test_every_line_of_every_table_can_be_run():
    """A table that asks for a run which no grid has could never be filled."""
    known = {
        (grid.data.name, run.name)
        for grid in map(grids.read, grids.names())
        for s in grid.stacks
        for run in s
    }
    asked = {
        (data, line.run)
        for spec in SPECS.values()
        for data in spec.data
        for line in spec.lines
        if line.data is None or data in line.data
    }
    assert asked - known == set()


def test_the_same_run_has_one_name_in_every_grid():
    shared = {run.folder for stack in grids.read("ablations").stacks for run in stack}
    assert shared & {
        run.folder for stack in grids.read("cifar100").stacks for run in stack
    } == {f"rf-dlc-paper/seed-{seed}" for seed in (0, 1, 2)}
    assert Wanted("ce", {"b": 1, "a": 2}, 3).folder == "ce+a=2+b=1/seed-3"
    assert Wanted("ce", {"compile": True}, 3, hold_out=0.1).folder == "ce/held-out-3"


def test_seeds_and_settings_of_the_command_reach_every_run():
    grid = grids.read("digits", seeds=[7], extra={"epochs": "2"})
    assert {run.seed for stack in grid.stacks for run in stack if not run.hold_out} == {
        7
    }
    assert all(
        run.name.endswith("epochs=2") or "epochs=2+" in run.name
        for stack in grid.stacks
        for run in stack
    )


def test_a_grid_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="did you mean 'cifar100'"):
        grids.read("cifar1000")
    with pytest.raises(InputError, match=r"nothing\.toml: the grid cannot be read"):
        grids.read(str(tmp_path / "nothing.toml"))


GRID = """
seeds = [0]
[data]
source = "digits-lt"
[[stacks]]
runs = [{ method = "ce" }]
"""


def read_text(tmp_path, text, **options):
    path = tmp_path / "made.toml"
    path.write_text(text)
    return grids.read(str(path), **options)


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("seeds = [0]", "seeds = [", "made.toml: "),
        ("seeds = [0]", "seeds = [0]\ncalibratoin = 3", "did you mean 'calibration'"),
        ("seeds = [0]", "seeds = 3", "seeds = 3: Input should be a valid list"),
        ("seeds = [0]", "seeds = []", "at least 1 item"),
        ("seeds = [0]", "seeds = [true]", "valid integer"),
        ("seeds = [0]", "", "expected whole numbers"),
        (
            "seeds = [0]",
            "seeds = [0]\ncalibration = { hold_out = 0, seeds = [0] }",
            "hold_out = 0.*greater than 0",
        ),
        (
            "seeds = [0]",
            "seeds = [0]\ncalibration = { hold_out = 0.1 }",
            r"calibration.seeds = .*Field required",
        ),
        ("[data]", "[[data]]", r"data = \[.*valid dictionary"),
        ('"digits-lt"', '"digits-lt"\nfactr = 3', "did you mean 'factor'"),
        (
            '"digits-lt"',
            '"digits-lt"\nfactor = 3',
            r"needs `largest`.*options = \{ factor = 3 \}",
        ),
        (
            '"digits-lt"',
            '"digits-lt"\nname = "few"\nlargest = "3"',
            "largest = '3'.*valid integer",
        ),
        ('"digits-lt"', '"digits-lt"\nlargest = 30', "largest needs a name"),
        (
            '"digits-lt"',
            '"digits-lt"\nname = "few"\nlargest = 0',
            "largest = 0.*greater than or equal to 1",
        ),
        (
            '"digits-lt"',
            '"digits-lt"\noptions = { factor = 3 }',
            "options needs a name",
        ),
        (
            '"digits-lt"',
            '"digits-lt"\ntest = "vall"',
            "data.test = 'vall'.*'test' or 'val'",
        ),
        (
            '"digits-lt"',
            '"digits-lt"\nname = "../digits"',
            "data.name = .*should match pattern",
        ),
        ("[[stacks]]", "[[stacks]]\nsedes = [1]", "did you mean 'seeds'"),
        ('[{ method = "ce" }]', "[]", "it has no runs"),
        ('[{ method = "ce" }]', '["ce"]', "runs.0 = 'ce'.*valid dictionary"),
        ('"ce"', "3", "has no method"),
        ('"ce"', '"ce", seed = 5', "no seed of its own"),
    ],
)
def test_what_a_grid_cannot_say_is_named(tmp_path, right, wrong, told):
    assert read_text(tmp_path, GRID).stacks == ((Wanted("ce", {}, 0),),)
    assert right in GRID
    with pytest.raises(InputError, match=told):
        read_text(tmp_path, GRID.replace(right, wrong))


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    assert read_text(tmp_path, "\ufeff" + GRID) == read_text(tmp_path, GRID)


def test_grids_that_share_their_results_are_of_the_same_data():
    recipes = {}
    for name in grids.names():
        data = grids.read(name).data
        assert recipes.setdefault(data.name, data.recipe) == data.recipe


def test_a_run_that_is_named_twice_is_one_run(tmp_path):
    twice = GRID.replace("[0]", "[0, 1, 0]").replace(
        '{ method = "ce" }', '{ method = "ce" }, { method = "ce", epochs = 3 }'
    )
    (stack,) = read_text(tmp_path, twice, extra={"epochs": "2"}).stacks
    assert [run.folder for run in stack] == ["ce+epochs=2/seed-0", "ce+epochs=2/seed-1"]


def test_seeds_may_be_those_of_the_stacks_alone(tmp_path):
    own = GRID.replace("seeds = [0]", "").replace(
        "[[stacks]]", "[[stacks]]\nseeds = [4]"
    )
    assert [run.seed for run in read_text(tmp_path, own).stacks[0]] == [4]


def test_a_part_that_is_not_there_cannot_be_scored(tmp_path):
    with pytest.raises(InputError, match="digits-lt has no val split"):
        Source(source="digits-lt", test="val").load(tmp_path)


def test_thinned_follows_the_profile_by_rank():
    data = thinned(made([40, 100, 60]), 30, 9)
    assert data.classes.counts == (
        3,
        30,
        10,
    )  # class 1 is the most frequent, class 0 the rarest
    assert len(data.test) == 6


def test_thinned_refuses_what_the_data_cannot_give():
    with pytest.raises(InputError, match=r"0 has 5 of 10.*whole data set"):
        thinned(made([5, 100, 60]), 30, 3)


def test_separated_groups_lie_in_one_split_and_the_test_part_stays():
    groups = {
        "train": np.array(["a", "a", "b", "c", "d", "e", "f", "g"]),
        "val": np.array(["h", "b", "i", "j"]),
        "test": np.array(["a", "h", "k", "l"]),
    }
    data = without_shared_groups(made([4, 4], groups))
    assert data.train.groups.tolist() == ["c", "d", "e", "f", "g"]
    assert data.val.groups.tolist() == ["b", "i", "j"]
    assert data.test.groups.tolist() == ["a", "h", "k", "l"]
    assert data.classes.counts == (1, 4)


def test_separating_needs_groups():
    with pytest.raises(InputError, match="groups of train are not known"):
        without_shared_groups(made([4, 4]))
