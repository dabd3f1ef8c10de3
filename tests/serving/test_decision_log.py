"""Decisions that are logged, labels that come later, and deciders that are replaced
under load.
"""

import asyncio
import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import rfdlc
from rfdlc import Predictions
from rfdlc.monitoring import watch as watching
from rfdlc.monitoring.feedback import decider_version
from rfdlc.monitoring.monitor import Reference
from rfdlc.monitoring.watch import read_log
from rfdlc.serving import decision_log
from rfdlc.serving.backend import Answer
from rfdlc.serving.decision_log import DecisionLog
from rfdlc.serving.metrics import Metrics


@pytest.fixture
def scores(run):
    """Probabilities of held-out samples, and their names of classes."""
    held = Predictions.load(run / "held-out.npz")
    p = np.exp(
        held.scores.values[0] - held.scores.values[0].max(axis=1, keepdims=True)
    ).astype(float)
    return np.tile(p / p.sum(axis=1, keepdims=True), (3, 1)), 3 * list(
        held.classes.select(held.targets)
    )


def asked(served, p, **path):
    status, _, body = served.ask({"probabilities": p.tolist()}, **path)
    assert status == 200
    return json.loads(body)


def test_a_log_has_what_was_decided_and_is_watched(
    backend, run, start, scores, tmp_path
):
    p, _ = scores
    held = Predictions.load(run / "held-out.npz")
    log = DecisionLog(tmp_path / "log", held)
    with start(backend, logs={"1": log}) as served:
        answers = [asked(served, piece) for piece in np.array_split(p[:200], 8)]
        other = {"matrix": (2 * np.eye(10)).tolist()}
        status, _, body = served.ask(
            {"probabilities": p[:2].tolist(), "utility": other}
        )
        own = json.loads(body)
        _, _, page = served.ask(path="/metrics", method="GET")
    ids, actions = (
        [cell for answer in answers for cell in answer[name]]
        for name in ("id", "action")
    )
    assert len(set(ids)) == 200
    assert status == 200
    assert "id" not in own
    assert (
        {answer["decider"] for answer in answers}
        == {own["decider"]}
        == {decider_version(backend.decider)}
    )
    found = read_log(tmp_path / "log")
    assert found.version == own["decider"]
    assert [
        found.decider.utility.actions[i] for i in found.decisions.actions
    ] == actions
    expected = np.asarray(backend.decider.probabilities(p[:200]))
    assert found.decisions.probabilities == pytest.approx(expected, abs=1e-6)
    loaded = Predictions.load(tmp_path / "log")  # other commands read it, too
    assert loaded.ids.tolist() == ids
    assert loaded.scores.corrected
    watched = rfdlc.watch(tmp_path / "log", run, window=100)
    assert len(watched.windows) == 2
    assert f'rfdlc_decider_info{{version="{own["decider"]}"}} 1.0' in page.decode()
    assert "rfdlc_expected_utility " in page.decode()
    assert log.monitor is not None
    assert not (tmp_path / "log" / "feedback.jsonl").exists()


def test_files_are_rotated_and_the_dashboard_asks_for_metrics_that_exist(
    backend, start, scores, tmp_path, monkeypatch
):
    monkeypatch.setattr(decision_log, "ROWS", 100)
    monkeypatch.setattr(decision_log, "GATHERED", 2)
    monkeypatch.setattr(decision_log, "FILES", 3)
    p, _ = scores
    with start(backend, logs={"1": DecisionLog(tmp_path)}) as served:
        ids = [name for _ in range(10) for name in asked(served, p[:60])["id"]]
        _, _, page = served.ask(path="/metrics", method="GET")
    files = sorted(tmp_path.glob("*.parquet"))
    assert len(files) == 3
    assert Predictions.load(files[-1]).ids[-1] == ids[-1]
    assert len(read_log(tmp_path).decisions) == 360  # two requests of 60 per file
    dashboard = (Path(__file__).parents[2] / "docs/monitoring/grafana.json").read_text(
        encoding="utf-8"
    )
    for name in set(re.findall(r"rfdlc_[a-z_]+", dashboard)):
        assert (
            name.removesuffix("_bucket").removesuffix("_count").removesuffix("_total")
            in page.decode()
        ), name


def test_feedback_gives_the_realised_utility_and_a_new_decider(
    backend, run, start, scores, tmp_path, monkeypatch
):
    p, labels = scores
    log = DecisionLog(tmp_path)
    with start(backend, logs={"1": log}) as served:
        answer = [asked(served, piece) for piece in np.array_split(p[:120], 4)]
        ids = [name for each in answer for name in each["id"]]
        actions = [name for each in answer for name in each["action"]]
        status, _, body = served.ask(
            {"ids": [*ids, "x-1-0"], "labels": [*labels[:120], labels[0]]},
            path="/feedback",
        )
        found = json.loads(body)
        bad = [
            served.ask(given, path="/feedback")[0]
            for given in (
                {"ids": ids},
                {"ids": ids[:1], "labels": ["yeti"]},
                {"ids": ids[:2], "labels": labels[:1]},
                {"ids": ids[:1], "labels": labels[:1], "propensity": [0.0]},
                {"ids": ids[:1], "labels": labels[:1], "labelled": "some"},
                {"ids": ids[:1], "labels": labels[:1], "labelled": "propensity"},
                {
                    "ids": ids[:1],
                    "labels": labels[:1],
                    "labelled": "by-action:yeti=100%,others=5%",
                },
                b"[",
                [1],
            )
        ]
        kind = served.ask(b"x", path="/feedback", Content_Type="text/plain")[0]
    assert status == 200
    assert (found["matched"], found["unknown"]) == (120, 1)
    utility = backend.decider.utility
    rows = utility.classes.encode(labels[:120])
    values = utility.matrix[rows, [utility.actions.index(name) for name in actions]]
    assert found["realised_utility"] == pytest.approx(values.mean())
    assert bad == [422] * 9
    assert kind == 415
    option, options, realised = rfdlc.recalibrate(
        tmp_path, tmp_path / "new.json", force=True
    )
    assert realised.utility == pytest.approx(values.mean())
    assert {each.name for each in options} == {"prior", "calibration", "both"}
    assert decider_version(
        rfdlc.Decider.load(tmp_path / "new.json")
    ) == decider_version(option.decider)
    assert not rfdlc.Decider.load(tmp_path / "new.json").sets
    sets = backend.decider.fit_sets(
        Predictions.load(run / "held-out.npz"), coverage=0.9
    )
    log = replace(read_log(tmp_path), decider=sets)
    with monkeypatch.context() as given:
        given.setattr(watching, "read_log", lambda *_: log)
        with pytest.warns(
            UserWarning, match="prediction sets .* are left out: fit them"
        ):
            rfdlc.recalibrate(tmp_path, tmp_path / "new.json", force=True)
    with (tmp_path / "feedback.jsonl").open("a") as file:
        file.write('{"id": "')  # the server is writing this line
    assert len(read_log(tmp_path).labels.rows) == 120
    with (tmp_path / "feedback.jsonl").open("a") as file:
        file.write(
            '{"id": "a"}\n'
        )  # a server was killed there, and the next one went on
    with pytest.warns(UserWarning, match=r"feedback.jsonl: 1 line left out: expected"):
        assert len(read_log(tmp_path).labels.rows) == 120


def told(served, ids, labels):
    given = {"ids": list(ids), "labels": list(labels)}
    status, _, body = served.ask(given, path="/feedback")
    return status, json.loads(body)


def test_ids_cannot_be_guessed_and_what_the_log_never_gave_is_not_kept(
    backend, start, scores, tmp_path
):
    p, labels = scores
    with start(backend, logs={"1": DecisionLog(tmp_path)}) as served:
        ids = asked(served, p[:20])["id"]
        name, _, code = ids[0].rpartition("-")
        guessed = [
            name,
            f"{name}-",
            f"{name}-{'0' * len(code)}",
            ids[0][:-1],
            f"{ids[0]} ",
            ids[0].upper(),
            f"{name.replace('-', '-0')}-{code}",
            f"{name[:-1]}1-{code}",
            "\ud7ff-\u0661-é",
            "x" * 10_000,
        ]
        status, found = told(served, guessed, labels[:1] * len(guessed))
        assert (status, found["matched"], found["unknown"]) == (200, 0, len(guessed))
        assert not (tmp_path / "feedback.jsonl").exists()
        status, found = told(served, ids[:3], labels[:3])
        assert (found["matched"], found["unknown"], found["labels"]) == (3, 0, 3)
    assert len({one.rpartition("-")[2] for one in ids}) == 20


def test_a_second_label_is_counted_and_the_first_one_stays(
    backend, start, scores, tmp_path
):
    p, labels = scores
    other = ["1" if label == "0" else "0" for label in labels[:4]]
    with start(backend, logs={"1": DecisionLog(tmp_path)}) as served:
        ids = asked(served, p[:8])["id"]
        _, first = told(served, [*ids[:4], ids[0]], [*labels[:4], other[0]])
        _, second = told(served, ids[:5], [*other, labels[4]])
        _, third = told(served, ids[:4], labels[:4])
    names = ("matched", "repeated", "conflicting")
    assert [first[name] for name in names] == [4, 0, 1]
    assert [second[name] for name in names] == [1, 0, 4]
    assert [third[name] for name in names] == [0, 4, 0]
    assert "conflicting ones were left out" in second["advice"]
    assert third["realised_utility"] == second["realised_utility"]
    lines = (tmp_path / "feedback.jsonl").read_text().splitlines()
    kept = [(json.loads(line)["id"], json.loads(line)["label"]) for line in lines]
    assert kept == list(zip(ids[:5], labels[:5], strict=True))
    with (tmp_path / "feedback.jsonl").open("a") as file:
        file.write(json.dumps({"id": ids[1], "label": other[1]}) + "\n")
    with pytest.warns(UserWarning, match="1 label left out: the first label of"):
        log = read_log(tmp_path).labels
    expected = backend.decider.utility.classes.encode(labels[:5])
    assert log.targets[np.argsort(log.rows)].tolist() == expected.tolist()


def sent(served, ids, labels, **how):
    """The answer to labels that are sent with a design or propensities."""
    given = {"ids": list(ids), "labels": list(labels), **how}
    status, _, body = served.ask(given, path="/feedback")
    return status, json.loads(body)


def test_the_last_stated_design_of_a_decision_counts_and_stays_without_one(
    backend, start, scores, tmp_path, monkeypatch
):
    p, labels = scores
    monkeypatch.setattr(decision_log, "MOST_EARLIER", 80)
    chosen = np.sort(np.random.default_rng(0).permutation(100)[:40])
    names = [labels[i] for i in chosen]
    with start(backend, logs={"1": DecisionLog(tmp_path)}) as served:
        all_ids = asked(served, p[:100])["id"]
        ids = [all_ids[i] for i in chosen]
        _, wrong = sent(served, ids, names, labelled="random:90%")
        _, right = sent(served, ids, names, labelled="random:40%")
        _, again = sent(served, ids, names)
        _, same = sent(served, ids, names, labelled="random:0.4")
        _, chance = sent(served, ids, names, propensity=[0.4] * 40)
        _, beyond = sent(served, ids, names, labelled="random")
    counts = ("matched", "repeated", "not_kept")
    assert [wrong[name] for name in counts] == [40, 0, 0]
    for answer in (right, again, same, chance):
        assert [answer[name] for name in counts] == [0, 40, 0]
    assert [beyond[name] for name in counts] == [0, 0, 40]
    assert wrong["realised_utility"] is None
    assert "and the stated share is 0.9" in wrong["advice"]
    for answer in (right, again, same):
        assert answer["labelled"] == "random:0.4"
    for answer in (chance, beyond):
        assert answer["labelled"] == "propensity"
    lines = (tmp_path / "feedback.jsonl").read_text().splitlines()
    stated = [json.loads(line)["labelled"] for line in lines]
    assert stated == ["random:0.9"] * 40 + ["random:0.4"] * 40 + ["propensity"] * 40
    kept = read_log(tmp_path).labels
    assert set(kept.sent) == {"propensity"}
    assert set(kept.propensity) == {0.4}


def test_a_conflicting_label_states_no_design(backend, start, scores, tmp_path):
    p, labels = scores
    other = ["1" if label == "0" else "0" for label in labels[:3]]
    with start(backend, logs={"1": DecisionLog(tmp_path)}) as served:
        ids = asked(served, p[:100])["id"]
        sent(served, ids[:3], labels[:3])
        second = [*other, *labels[3:50]]
        _, found = sent(served, ids[:50], second, labelled="random:50%")
    assert (found["matched"], found["conflicting"]) == (47, 3)
    line = {"id": ids[0], "label": other[0], "labelled": "random:50%"}
    with (tmp_path / "feedback.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.warns(UserWarning, match="1 label left out: the first label of"):
        kept = read_log(tmp_path).labels
    assert list(kept.sent) == [None] * 3 + ["random:0.5"] * 47


def test_torn_lines_are_left_out_and_designs_of_others_are_read(
    backend, start, scores, tmp_path
):
    p, labels = scores
    with start(backend, logs={"1": DecisionLog(tmp_path)}) as served:
        ids = asked(served, p[:40])["id"]
        sent(served, ids[:20], labels[:20], labelled="random:50%")
    damaged = {"id": ids[0], "label": labels[0], "propensity": "high"}
    unstated = {"id": ids[30], "label": labels[30]}
    with (tmp_path / "feedback.jsonl").open("a") as file:
        file.write(f'{{"id": "{ids[1]}", "labe\n')
        file.write(json.dumps(damaged) + "\n" + json.dumps(unstated) + "\n")
    with pytest.warns(UserWarning, match="2 lines left out"):
        kept = read_log(tmp_path).labels
    assert kept.rows.tolist() == [*range(20), 30]
    assert list(kept.sent) == ["random:0.5"] * 20 + [None]


def test_designs_have_a_bound(backend, start, scores, tmp_path, monkeypatch):
    p, labels = scores
    monkeypatch.setattr(decision_log, "MOST_DESIGNS", 2)
    stated = ("random:1%", "random:2%", "random:3%", "random:2%")
    with start(backend, logs={"1": DecisionLog(tmp_path)}) as served:
        ids = asked(served, p[:4])["id"]
        answers = [
            sent(served, ids[i : i + 1], labels[i : i + 1], labelled=design)
            for i, design in enumerate(stated)
        ]
        long = "random:1%" + " " * 2000
        too_long = sent(served, ids[:1], labels[:1], labelled=long)
    assert [status for status, _ in answers] == [200, 200, 422, 200]
    assert "expected at most 2 different designs" in answers[2][1]["detail"]
    assert too_long[0] == 422
    assert len((tmp_path / "feedback.jsonl").read_text().splitlines()) == 3


def test_the_order_of_time_holds_when_the_oldest_decisions_are_forgotten(
    backend, start, scores, tmp_path, monkeypatch
):
    p, labels = scores
    monkeypatch.setattr(decision_log, "RING", 64)
    with start(backend, logs={"1": DecisionLog(tmp_path)}) as served:
        ids = asked(served, p[:100])["id"]
        _, found = told(served, ids[30:70], labels[30:70])
    assert (found["earlier"], found["matched"]) == (6, 34)
    assert found["labels"] == found["decisions"] == 34  # all up to the newest one


def test_labels_of_earlier_decisions_have_a_bound(
    backend, start, scores, tmp_path, monkeypatch
):
    p, labels = scores
    monkeypatch.setattr(decision_log, "MOST_EARLIER", 5)
    with start(backend, logs={"1": DecisionLog(tmp_path)}) as served:
        ids = asked(served, p[:20])["id"]
    with start(backend, logs={"1": DecisionLog(tmp_path)}) as served:
        _, first = told(served, ids[:3], labels[:3])
        _, second = told(served, ids[:10], labels[:10])
    assert (first["earlier"], first["not_kept"]) == (3, 0)
    assert (second["earlier"], second["not_kept"]) == (2, 8)
    assert len((tmp_path / "feedback.jsonl").read_text().splitlines()) == 5
    (tmp_path / "ids.key").write_bytes(b"short")
    with pytest.raises(rfdlc.InputError, match="has 5 bytes, expected 32"):
        DecisionLog(tmp_path)


def test_a_full_disk_tears_no_line(backend, start, scores, tmp_path):
    """A limit on the size of files stands for the disk: a write first does a part."""
    import resource

    p, labels = scores
    file = tmp_path / "feedback.jsonl"
    file.write_bytes((b" " * 999 + b"\n") * 4000)  # more than this process writes
    with start(backend, logs={"1": DecisionLog(tmp_path)}) as served:
        ids = asked(served, p[:40])["id"]
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_150, limits[1]))
        try:
            failed = told(served, ids, labels[:40])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        size = file.stat().st_size
        again = told(served, ids, labels[:40])
    assert failed[0] == 503
    assert "could not be written" in failed[1]["detail"]
    assert size == 4_000_000
    assert (again[0], again[1]["matched"], again[1]["repeated"]) == (200, 40, 0)


def test_a_new_line_is_never_joined_to_a_torn_one(backend, start, scores, tmp_path):
    p, labels = scores
    file = tmp_path / "feedback.jsonl"
    file.write_bytes(b'{"id": "3f2a9c01-17-00\xff')
    with start(backend, logs={"1": DecisionLog(tmp_path)}) as served:
        ids = asked(served, p[:60])["id"]
        assert told(served, ids, labels[:60])[1]["matched"] == 60
    with pytest.warns(UserWarning, match="1 line left out"):
        assert len(read_log(tmp_path).labels.rows) == 60
    with pytest.warns(UserWarning, match="1 line left out"):
        rfdlc.recalibrate(tmp_path, tmp_path / "new.json")


def test_feedback_and_recalibrate_give_the_same_numbers(
    backend, start, scores, tmp_path
):
    p, labels = scores
    with start(backend, logs={"1": DecisionLog(tmp_path)}) as served:
        ids = asked(served, p[:150])["id"]
        chosen = np.sort(np.random.default_rng(0).permutation(150)[:90]).tolist()
        given = {
            "ids": [ids[i] for i in chosen],
            "labels": [labels[i] for i in chosen],
        }
        unstated = json.loads(served.ask(given, path="/feedback")[2])
        found = json.loads(
            served.ask(given | {"labelled": "random"}, path="/feedback")[2]
        )
    assert unstated["realised_utility"] is None  # they may depend on the outcome
    assert unstated["advice"].startswith("no estimate from these labels, which are kep")
    own = rfdlc.recalibrate(tmp_path, tmp_path / "new.json", force=True)[2].to_dict()
    assert set(own) < set(found)
    for name, value in own.items():
        assert found[name] == pytest.approx(value, abs=1e-6), name
    assert (found["labels"], found["decisions"]) == (90, chosen[-1] + 1)
    assert found["labelled"] == "random"


def test_labels_of_no_sample_change_nothing_and_those_of_a_sample_are_found_among_them(
    backend, start, scores, tmp_path
):
    p, labels = scores
    samples = len(p)
    with start(backend, logs={"1": DecisionLog(tmp_path)}) as served:
        answers = [asked(served, piece) for piece in np.array_split(p, 8)]
        ids = [name for answer in answers for name in answer["id"]]
        actions = [name for answer in answers for name in answer["action"]]
        wrong = [i for i in range(samples) if actions[i] != labels[i]]
        order = np.random.default_rng(0).permutation(samples)
        chosen = order[: samples // 2].tolist()
        posts = [
            (wrong, {}),
            (chosen, {"labelled": "random:50%"}),
            (wrong, {}),  # again: what was chosen at random stays so
        ]
        found = [
            json.loads(
                served.ask(
                    {
                        "ids": [ids[i] for i in rows],
                        "labels": [labels[i] for i in rows],
                        **how,
                    },
                    path="/feedback",
                )[2]
            )
            for rows, how in posts
        ]
    assert found[0]["realised_utility"] is None
    assert found[1]["labels"] == found[2]["labels"] == len(chosen)
    assert found[2]["realised_utility"] == found[1]["realised_utility"]
    others = len(set(wrong) - set(chosen))
    assert found[2]["labels_left_out"] == others > 0
    own = rfdlc.recalibrate(tmp_path, tmp_path / "new.json", force=True)[2]
    assert (own.labelled, own.left_out) == (len(chosen), others)
    assert own.utility == pytest.approx(found[1]["realised_utility"], abs=1e-6)


def test_labels_after_a_restart_and_of_an_earlier_decider_are_matched_with_the_log(
    backend, run, start, scores, tmp_path
):
    p, labels = scores
    with start(backend, logs={"1": DecisionLog(tmp_path)}) as served:
        ids = asked(served, p[:120])["id"]
    with start(
        backend, logs={"1": DecisionLog(tmp_path)}
    ) as served:  # another process knows none of them
        found = json.loads(
            served.ask({"ids": ids, "labels": labels[:120]}, path="/feedback")[2]
        )
    assert (found["matched"], found["earlier"], found["unknown"]) == (0, 120, 0)
    assert (
        "are kept: rfdlc watch and rfdlc recalibrate match them with the log"
        in found["advice"]
    )
    option, _, realised = rfdlc.recalibrate(tmp_path, tmp_path / "new.json")
    assert realised.labelled == 120

    log, new = DecisionLog(tmp_path), option.decider
    log.add(Answer.of(new, np.asarray(new.probabilities(p[:50])), np.zeros(50)))
    log.close()
    old = tmp_path / "deciders" / f"{decider_version(backend.decider)}.json"
    later, earlier = rfdlc.watch(tmp_path, run), rfdlc.watch(tmp_path, run, decider=old)
    assert (
        f"Left out: 120 decisions of other deciders than {decider_version(new)}."
        in later.verdict[-1]
    )
    assert (later.realised, earlier.realised.labelled, earlier.log.left_out) == (
        None,
        120,
        50,
    )
    with pytest.raises(rfdlc.InputError, match="name an earlier decider by --decider"):
        rfdlc.recalibrate(tmp_path, tmp_path / "newer.json")
    assert (
        rfdlc.recalibrate(tmp_path, tmp_path / "newer.json", decider=old)[2].labelled
        == 120
    )
    with pytest.raises(rfdlc.InputError, match="has no decisions of decider"):
        rfdlc.watch(
            tmp_path,
            run,
            decider=backend.decider.replace(
                target_prior=np.full(10, 0.1), rule="argmax"
            ),
        )


def test_a_failure_of_the_monitor_or_the_disk_loses_nothing_else(
    backend, run, scores, tmp_path, monkeypatch
):
    p, log = (
        scores[0][:50],
        DecisionLog(tmp_path, Predictions.load(run / "held-out.npz")),
    )
    deciders = (
        backend.decider,
        backend.decider.replace(
            target_prior=np.array([0.91] + [0.01] * 9), budget=None
        ),
    )

    def fail(*given, **options):
        raise OSError("no space left")

    def write():
        for decider in deciders:
            log.add(
                Answer.of(decider, np.asarray(decider.probabilities(p)), np.zeros(50))
            )
        log.flush().result()

    with monkeypatch.context() as broken:
        broken.setattr(decision_log, "Monitor", fail)
        write()
        assert len(list(tmp_path.glob("*.parquet"))) == 2
        assert (log.dropped, log.monitor) == (0, None)
        broken.setattr(decision_log, "replacing", fail)
        write()
        assert (log.dropped, log._queued) == (100, 0)
    write()
    assert (log.dropped, log.monitor.evidence["class prior"].samples) == (100, 50)
    log.close()


def test_samples_of_a_whole_file_are_tested_and_those_of_many_classes_evenly(
    backend, run, tmp_path, monkeypatch
):
    decider, held = backend.decider, Predictions.load(run / "held-out.npz")
    reference = Reference.fit(decider, held)
    rows = np.random.default_rng(0).choice(len(held), 3000, p=reference.weights)
    burst = reference.decisions.probabilities[rows]
    burst[1500:] = [*[0.01] * 9, 0.91]

    def monitored(folder):
        log = DecisionLog(tmp_path / folder, held, per_month=30_000)
        log.add(Answer.of(decider, burst, np.zeros(len(burst))))
        before = Metrics(decider).text(log.dropped, log.monitor).decode()
        log.flush().result()
        log.close()
        return log.monitor, before

    found, before = monitored("all")
    assert (found.evidence["class prior"].samples, found.per_month) == (3000, 30_000)
    assert (
        found.alarms["class prior"] > 1500
    )  # the change comes after the first 1,000 samples
    assert "rfdlc_reference_utility NaN" in before  # and not 0, which would be a value
    assert "rfdlc_expected_utility NaN" in before
    monkeypatch.setattr(decision_log, "MONITORED", (100, 10_000))
    found, _ = monitored("some")
    assert found.evidence["class prior"].samples == 1000
    assert 500 < found.alarms["class prior"] < 1000


def test_a_decider_file_that_cannot_be_looked_at_is_tried_again(tmp_path):
    (tmp_path / "folder").write_text("a file")
    found = []
    live = decision_log.DeciderFile(tmp_path / "folder" / "decider.json", found.append)
    asyncio.run(live.tend())
    (tmp_path / "folder").unlink()
    (tmp_path / "folder").mkdir()
    rfdlc.Decider(rfdlc.Utility.one_hot(2)).save(tmp_path / "folder" / "decider.json")
    asyncio.run(live.tend())
    assert len(found) == 1


def test_a_decider_is_replaced_under_load_and_no_request_fails(
    backend, start, model, samples, scores, tmp_path
):
    p, _ = scores
    file, old = tmp_path / "decider.json", backend.decider
    new = old.replace(target_prior=np.array([0.91] + [0.01] * 9), budget=None)
    x, answers, done = samples[:4], [], threading.Event()

    def send(served):
        while not done.is_set():
            status, _, body = served.ask({"arrays": x.tolist()})
            answers.append((status, json.loads(body)))

    with start(backend, decider=file) as served:
        threads = [threading.Thread(target=send, args=(served,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        file.write_text("{")  # refused, and the old one stays
        time.sleep(1.5)
        new.save(tmp_path / "beside.json")
        (tmp_path / "beside.json").rename(file)
        time.sleep(2.5)
        done.set()
        for thread in threads:
            thread.join()
        by_probabilities = asked(served, p[:5], path="/decide?full=true")
    assert {status for status, _ in answers} == {200}
    values = {
        decider_version(each): each.explain(model.predict(x)).value
        for each in (old, new)
    }
    assert {answer["decider"] for _, answer in answers} == set(values)
    for _, answer in answers:  # each by the decider that it names
        assert answer["expected_utility"] == pytest.approx(
            values[answer["decider"]], abs=1e-4
        )
    assert by_probabilities["probabilities"] == pytest.approx(
        np.asarray(new.probabilities(p[:5])), abs=1e-5
    )


def test_a_server_without_a_log_says_so(served):
    status, _, body = served.ask({"ids": ["a"], "labels": ["0"]}, path="/feedback")
    assert status == 404
    assert "--log-decisions DIR" in json.loads(body)["detail"]
