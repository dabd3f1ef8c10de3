"""Ray and Dask give what the library gives; workers that are killed lose nothing."""

import json
import os
import pickle
import signal
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, dataset
from pyarrow import parquet as pq

import rfdlc
from rfdlc import Decider, InputError, Utility
from rfdlc.lakes.frames import on_batches, on_frame, on_frames
from rfdlc.lakes.tables import DecideTable

NAMES = ["cat", "dog", "newt"]
STARTS_WITHIN = 60  # seconds


@pytest.fixture(scope="module")
def scores():
    p = np.random.default_rng(0).dirichlet([3, 2, 1], 400).astype(np.float32)
    return pa.table({"id": np.arange(400), **dict(zip(NAMES, p.T, strict=True))})


@pytest.fixture(scope="module")
def decide():
    return DecideTable(
        Decider(Utility([[1, 0, -1], [0, 1, -1], [-4, -4, 1]], NAMES)), keep=("id",)
    )


@pytest.fixture(scope="module")
def model_of_rows(tmp_path_factory):
    """A run on a table with numbers and texts, and new rows."""
    pytest.importorskip("torch")
    folder, rng = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    age, label = rng.normal(size=60), np.repeat(["ill", "well"], [20, 40])
    columns = {"age": age, "site": rng.choice(["a", "b", "c"], 60), "label": label}
    csv.write_csv(pa.table(columns), folder / "train.csv")
    csv.write_csv(pa.table(columns).select(["age", "site"])[:5], folder / "new.csv")
    rfdlc.train(
        folder / "train.csv",
        "ce",
        folder / "run",
        data_options={"target": "label"},
        backbone="mlp",
        epochs=2,
        device="cpu",
    )
    return folder


@pytest.fixture(scope="module")
def ray():
    """A cluster of this machine with two CPUs; skipped where none can be started."""
    ray = pytest.importorskip(
        "ray", reason='Ray is not installed: pip install "rfdlc[ray]"'
    )
    pytest.importorskip(
        "ray.data", reason='Ray Data is not installed: pip install "rfdlc[ray]"'
    )

    def late(*_):
        raise TimeoutError(f"not within {STARTS_WITHIN} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(STARTS_WITHIN)
    given = {
        "include_dashboard": False,
        "log_to_driver": False,
        "object_store_memory": 100 * 2**20,
    }
    try:
        ray.init(address="local", num_cpus=2, **given)
        ray.get(ray.remote(lambda: None).remote())
    except (
        OSError,
        RuntimeError,
        ray.exceptions.RayError,
    ) as error:  # no ports, processes or shared memory
        ray.shutdown()
        pytest.skip(f"Ray cannot start a cluster on this machine: {error!r}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray
    ray.shutdown()


def by_id(table):
    return table.sort_by("id").combine_chunks()


def test_ray_decides_as_the_library(ray, scores, decide, tmp_path):
    from rfdlc.lakes import ray as stages

    pq.write_table(scores, tmp_path / "scores.parquet", row_group_size=100)
    found = stages.decide(
        ray.data.read_parquet(str(tmp_path / "scores.parquet")),
        decide.decider,
        keep=["id"],
    )
    table = by_id(pa.concat_tables(ray.get(found.to_arrow_refs())))
    assert table.to_pydict() == decide(scores).to_pydict()


def test_ray_predicts_as_the_library_although_an_actor_is_killed(
    ray, tmp_path, model_of_rows
):
    from rfdlc.lakes import ray as stages

    rows = csv.read_csv(model_of_rows / "new.csv").to_pydict()
    rows = {name: cells * 40 for name, cells in rows.items()}
    number = list(range(len(next(iter(rows.values())))))
    samples, killed = (
        ray.data.from_arrow(pa.table({"number": number, **rows})).repartition(6),
        tmp_path / "killed",
    )
    own, flag = stages.PredictBatch, str(killed)

    class Dying(own):  # it is pickled by value, as a class in a function is
        def __call__(self, batch):
            if 7 in batch["number"] and not os.path.exists(flag):
                open(flag, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            return own.__call__(self, batch)

    dying = SimpleNamespace(
        map_batches=lambda stage, **given: samples.map_batches(Dying, **given)
    )
    found = stages.predict(dying, model_of_rows / "run", keep=["number"], concurrency=1)
    table = pa.concat_tables(ray.get(found.to_arrow_refs())).sort_by("number")
    assert killed.exists()
    assert table["number"].to_pylist() == number
    source = tmp_path / "rows.csv"
    csv.write_csv(pa.table(rows), source)
    rfdlc.predict(model_of_rows / "run", source, tmp_path / "local.parquet")
    local = pq.read_table(tmp_path / "local.parquet")
    assert table["action"].to_pylist() == local["action"].to_pylist()
    for name in rfdlc.Model.load(model_of_rows / "run").classes.names:
        np.testing.assert_allclose(
            table[name].to_numpy(), local[name].to_numpy(), rtol=1e-5
        )


def test_ray_as_an_engine_of_the_command(
    ray, tmp_path, monkeypatch, capsys, model_of_rows
):
    from rfdlc.cli import main

    rfdlc.predict(
        model_of_rows / "run",
        model_of_rows / "new.csv",
        tmp_path / "local.parquet",
        target_prior="uniform",
    )
    words = [
        "predict",
        str(model_of_rows / "run"),
        str(model_of_rows / "new.csv"),
        "--out",
        str(tmp_path / "out"),
        "--json",
    ]
    monkeypatch.setattr(
        "sys.argv", ["rfdlc", *words, "--engine", "ray", "--target-prior", "uniform"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    table, local = (
        dataset.dataset(tmp_path / "out").to_table(),
        pq.read_table(tmp_path / "local.parquet"),
    )
    told = json.loads(capsys.readouterr().out)
    assert told["samples"] == sum(told["actions"].values()) == len(table) == len(local)
    assert table.to_pydict() == local.to_pydict()


@pytest.mark.parametrize("name", ["predictions.npz", "there"])
def test_ray_needs_a_new_folder(name, tmp_path, model_of_rows):
    """Before anything is started."""
    from rfdlc.lakes.ray import predict_source

    (tmp_path / "there").mkdir()
    with pytest.raises(
        rfdlc.InputError,
        match=f"{name}: engine ray writes Parquet files into a new folder",
    ):
        predict_source(
            model_of_rows / "run", model_of_rows / "new.csv", tmp_path / name
        )


def test_the_embedding_stage_computes_what_embed_writes(tmp_path):
    """On its batches, without a cluster; images have their channels last, as Ray reads
    them.
    """
    pytest.importorskip("torch")
    from rfdlc.lakes.ray import EmbedBatch

    network = {"channels": 1, "image_size": 8}
    rfdlc.embed("digits-lt", tmp_path / "features.npz", backbone="resnet8", **network)
    images = np.moveaxis(rfdlc.load("digits-lt").test.array[:40], 1, -1)
    found = EmbedBatch("resnet8", "image", "x", ("row",), network)(
        {"image": images, "row": np.arange(40)}
    )
    np.testing.assert_array_equal(
        found["x"], np.load(tmp_path / "features.npz")["test_x"][:40]
    )
    assert found["row"].tolist() == list(range(40))


def test_dask_decides_as_the_library(scores, decide):
    frames = pytest.importorskip(
        "dask.dataframe", reason='Dask is not installed: pip install "dask[dataframe]"'
    )
    frame = scores.to_pandas().set_index("id", drop=False)
    lazy = frames.from_pandas(frame, npartitions=5)
    found = lazy.map_partitions(
        on_frame, decide, meta=on_frame(frame.head(0), decide)
    ).compute()
    assert found.index.tolist() == frame.index.tolist()
    assert found.reset_index(drop=True).to_dict("list") == decide(scores).to_pydict()


def test_functions_for_spark(scores, decide):
    """What `mapInArrow` and `mapInPandas` call on workers: pickled, on iterators of
    batches and frames.
    """
    expected = decide(scores).to_pydict()
    in_arrow = pickle.loads(pickle.dumps(partial(on_batches, function=decide)))  # noqa: S301
    assert (
        pa.Table.from_batches(
            in_arrow(iter(scores.to_batches(max_chunksize=70)))
        ).to_pydict()
        == expected
    )
    pytest.importorskip("pandas")
    in_pandas = pickle.loads(pickle.dumps(partial(on_frames, function=decide)))  # noqa: S301
    frames = [scores.slice(start, 150).to_pandas() for start in range(0, 400, 150)]
    found = pa.concat_tables(map(pa.Table.from_pandas, in_pandas(iter(frames))))
    assert found.select(list(expected)).to_pydict() == expected


def test_functions_for_spark_on_spark(scores, decide):
    session = pytest.importorskip(
        "pyspark.sql", reason="Spark is not installed: pip install pyspark"
    ).SparkSession
    spark = (
        session.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .getOrCreate()
    )
    try:
        frame = spark.createDataFrame(scores.to_pandas())
        kinds = "id long, action string, expected_utility float"
        found = (
            frame.mapInArrow(partial(on_batches, function=decide), kinds)
            .toPandas()
            .sort_values("id")
        )
        assert found.to_dict("list") == decide(scores).to_pydict()
    finally:
        spark.stop()


# -- many trainings
# --------------------------------------------------------------------------------------


def test_a_sweep_on_ray_gives_the_table_of_one_process(ray, tmp_path):
    settings = (
        'epochs = 2\nwidths = [4]\ncalibration = "temperature"\npreset ='
        ' "features"\nmethod = "ce"\n'
    )
    text = (
        f'data = "digits-lt"\n[settings]\n{settings}[grid]\nlearning_rate = [0.1,'
        " 1e30]\n"
    )
    (tmp_path / "grid.toml").write_text(text)
    expected = rfdlc.sweep(tmp_path / "grid.toml", tmp_path / "here")
    assert (
        rfdlc.sweep(tmp_path / "grid.toml", tmp_path / "there", engine="ray")
        == expected
    )
    assert [row["state"] for row in expected] == ["finished", "diverged"]
    (tmp_path / "grid.toml").write_text(text.replace("epochs", "epoch"))
    with pytest.raises(InputError, match="setting 'epoch' is unknown"):
        rfdlc.sweep(tmp_path / "grid.toml", tmp_path / "no", engine="ray")
