"""The benchmarks' machinery: tables, targets, checks, interruption and reports. No time is asserted."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clearhead as ch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import measure
import models
import page
import paired
import peers
import reference
import report
import run
import show
import startup
import targets
import workload as work
import workloads
from targets import Target, judge
from workload import Workload

ROOT = Path(__file__).parents[1]
SMALL = Workload("small", ("some",), heads=2, tokens=40, dim=8)
KINDS = [
    SMALL,
    replace(SMALL, mask="causal", told="function"),
    replace(SMALL, mask="window", left=5),
    replace(SMALL, mask="documents", documents=4),
    replace(SMALL, mask="random"),
    replace(SMALL, mask="lengths", batch=3),
    replace(SMALL, score="alibi"),
    replace(SMALL, score="alibi", told="function"),
    replace(SMALL, score="additive"),
    replace(SMALL, heads=4, key_heads=2, queries=1),
    replace(SMALL, call="scaled_dot_product_attention", dtype="float64"),
    replace(SMALL, mask="causal", asks="riding"),
    replace(SMALL, mask="causal", asks="all"),
    replace(SMALL, mask="causal", asks="alone"),
    replace(SMALL, mask="causal", way="both"),
    replace(SMALL, mask="causal", call="drop-in"),
    replace(SMALL, score="additive", way="both"),
    Workload("tutorial", (), heads=1, tokens=3, dim=4, dtype="float64", given="tutorial"),
]


class Rest:
    """A machine without a limit: measuring a real one takes seconds."""

    work = 1

    def run(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run a table of one's own, on NumPy and Clearhead: (exit code, what the file holds)."""
    monkeypatch.setattr(paired, "SHORTEST", 0.001)
    monkeypatch.setattr(run.machine, "limits", lambda threads: dict.fromkeys(("float32", "float64", "bandwidth"), 1e9))
    monkeypatch.setattr(measure, "limit_of", lambda workload, threads: Rest())
    before = ch.get_num_threads()

    def main(rows: tuple[Any, ...], *options: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr(workloads, "ROWS", rows)
        file = tmp_path / "bench.json"
        code = run.main(["--json", str(file), "--peers", "naive", "clearhead", "--repeats", "3", *options])
        return code, json.loads(file.read_text(encoding="utf-8"))

    yield main
    ch.set_num_threads(before)


# the table


def test_rows_are_named_once_and_can_be_chosen() -> None:
    names = [row.name for row in workloads.ROWS]
    assert len(set(names)) == len(names) > 25
    assert [row.name for row in workloads.choose([])] == names
    assert {row.name for row in workloads.choose(["decode", "memory"])} >= {"decode-one", "memory"}
    with pytest.raises(ValueError, match="no workload or group nonsense: known are"):
        workloads.choose(["nonsense"])


@pytest.mark.parametrize("row", workloads.ROWS, ids=lambda row: row.name)
def test_each_row_has_targets_that_it_can_measure(row: Any) -> None:
    assert row.targets
    others = [] if row.measures == "start" else row.peers
    for target in row.targets:
        assert (target.at_least is None) != (target.at_most is None)
        assert target.figure in {*targets.FIGURES, *peers.MODULES}
        assert target.figure != "beside" or row.beside
        assert target.figure not in peers.MODULES or others is None or target.figure in others
        assert target.title.startswith(("at least ", "at most "))
    if row.measures == "memory":
        assert workloads.find(row.name) is row
        assert row.beside is None or workloads.find(row.beside.name) is row.beside


def test_what_a_row_is_set_beside_has_the_arithmetic_it_says() -> None:
    dense = workloads.DENSE
    (ragged,) = workloads.choose(["ragged"])
    assert isinstance(ragged, Workload)
    assert ragged.work / dense.work == pytest.approx(1, abs=0.01)
    assert set(ragged.lengths) >= {16, 2048}


@pytest.mark.parametrize("workload", KINDS, ids=lambda w: f"{w.title}{w.told}")
def test_results_agree_with_the_reference_and_wrong_ones_do_not(workload: Workload) -> None:
    """On every kind of work; and the cells that are counted are those that are visible."""
    for name in ("clearhead", "naive", *(["torch"] if workload.way == "both" else [])):
        peer = peers.load(name)
        if peer.lacks(workload) is None:
            numbers = peer.numbers(peer.prepare(workload)())
            assert reference.difference(workload, numbers) <= reference.TOLERANCE[workload.dtype]
            assert reference.difference(workload, 1.001 * numbers) > reference.TOLERANCE[workload.dtype]
    seen = sum(int(workload.sees(b, np.arange(workload.rows)).sum()) for b in range(workload.batch))
    assert workload.cells == (workload.rows * workload.tokens if workload.mask == "random" else seen)


def test_copies_take_turns_where_reading_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(SMALL, queries=1, bound="bytes")
    monkeypatch.setattr(work, "LARGE", 3 * one.work)
    first, second, third = one.arrays()
    assert np.array_equal(first[1], third[1])
    assert first[1] is not second[1]


# peers


def test_every_peer_is_a_module_of_its_own() -> None:
    files = {path.stem for path in (ROOT / "benchmarks/peers").glob("*.py")}
    assert {module.removeprefix("peers.") for module in peers.MODULES.values()} <= files


@pytest.mark.parametrize("name", ["clearhead", "naive"])
def test_a_peer_offers_what_the_protocol_asks(name: str) -> None:
    peer = peers.load(name)
    assert peer.name
    assert peer.version
    for member in ("set_threads", "lacks", "prepare", "numbers"):
        assert callable(getattr(peer, member))


def test_versions_of_peers_are_pinned_alike() -> None:
    """The extra names exact versions; the constraints say the same."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extra = re.search(r"^bench = \[(.*)\]$", project, flags=re.MULTILINE)
    assert extra
    pins = dict(re.findall(r'"(\w+)==([\d.]+)"', extra[1]))
    assert {"onnxruntime", "openvino", "jax"} <= set(pins)
    constraints = (ROOT / "benchmarks/constraints.txt").read_text(encoding="utf-8")
    for name, version in pins.items():
        assert f"{name}=={version}\n" in constraints


# targets


@pytest.mark.parametrize(
    ("target", "row", "reached", "short"),
    [
        (Target("limit", at_least=0.8), {"figures": {"limit": 0.79}}, 0.79, True),
        (Target("limit", at_least=0.8), {"figures": {"limit": 0.8}}, 0.8, False),
        (Target("beside", at_most=1.3), {"figures": {"beside": 1.31}}, 1.31, True),
        (Target("bytes", at_most=64e6), {"figures": {"bytes": 5e6}}, 5e6, False),
        (Target("torch", at_least=1.2), {"times_ours": {"torch": 1.1, "jax": 0.9}}, 1.1, True),
        (Target("fastest", at_least=1.2), {"times_ours": {"torch": 1.5, "jax": 1.3}}, 1.3, False),
        (Target("over naive", at_most=2.0), {"times_ours": {"naive": 0.4}}, 2.5, True),
        (Target("torch", at_least=1.2), {"times_ours": {}}, None, False),
        (Target("fastest", at_least=1.2), {}, None, False),
    ],
)
def test_a_target_is_judged(target: Target, row: dict[str, Any], reached: float | None, short: bool) -> None:
    (found,) = judge((target,), row)
    assert (found["reached"], found["short"]) == (reached, short)


def test_what_the_limit_would_reach_is_said() -> None:
    row = {"times_ours": {"torch": 1.1, "jax": 0.9}, "share": {"clearhead": 0.88, "torch": 0.8, "jax": 0.5}}
    wanted = (Target("torch", at_least=1.2), Target("fastest", at_least=1.2), Target("limit", at_least=0.8),
              Target("bytes", at_most=1.0))  # fmt: skip
    assert [target["limit"] for target in judge(wanted, row)] == [1.25, 2.0, 1.0, None]


# timing


def test_what_takes_long_takes_part_in_the_first_repetitions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "BUDGET", 0.0)
    monkeypatch.setattr(paired, "SHORTEST", 0.0001)
    samples = paired.prepare({"a": lambda: None, "b": lambda: None}, repeats=5)
    samples.most["a"] = 5
    for _ in range(5):
        samples.repeat()
    assert {name: len(took) for name, took in samples.seconds.items()} == {"a": 5, "b": paired.FEWEST}
    samples.seconds = {"a": [1.0, 2.0, 3.0, 100.0, 100.0], "b": [2.0, 4.0, 6.0]}
    assert samples.ratio("b", to="a") == 2.0


def test_of_a_limit_the_fastest_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "_per_call", lambda call, calls: call())
    seconds = iter([3.0, 2.0, 5.0, 4.0])
    samples = paired.Samples({"limit": lambda: next(seconds)}, {"limit": 4}, {"limit": 1}, best=frozenset({"limit"}))
    samples.repeat()
    assert samples.seconds == {"limit": [2.0]}


def test_a_new_process_is_timed_in_turn_with_another() -> None:
    start = startup.Start("x", (), "x", "sum(range(10))", beside="pass")
    found = startup.measure(start, repeats=2)
    assert [len(took) for took in found["seconds"].values()] == [2, 2]
    assert "seconds" in found["figures"]


# whole models

MODEL = models.ModelRun("m", ("models",), "a model", "generate", 24, 2, targets=(Target("torch", at_least=1.0),))
LINES = [
    {"clearhead": {"seconds": 1.0, "attention": 0.2}, "torch": {"seconds": 2.0, "attention": 0.8}},
    {"clearhead": {"seconds": 2.0, "attention": 0.1}, "torch": {"seconds": 2.0, "attention": 0.5}},
    {"clearhead": {"seconds": 1.0, "attention": 0.1}, "torch": {"seconds": 1.1, "attention": 0.6}},
]


def child(tmp_path: Path, source: str) -> Path:
    file = tmp_path / "child.py"
    file.write_text(f"import json, sys, time\nLINES = {LINES}\n{source}", encoding="utf-8")
    return file


def test_a_model_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = "print(*map(json.dumps, [*LINES, {'apart': 0.5 if sys.argv[2] == '7' else 0.0}]), sep='\\n')"
    monkeypatch.setattr(models, "CHILD", child(tmp_path, source))
    found = models.measure(MODEL, threads=2, repeats=3)
    assert found["times_ours"] == {"torch": 1.1}
    assert found["figures"] == {"attention": 5.0}
    assert found["median"] == {"clearhead": 1.0, "torch": 2.0}
    assert "disagree" not in found
    assert models.measure(MODEL, threads=7, repeats=3)["disagree"] == ["clearhead"]
    trained = models.summary(replace(MODEL, work="train"), [*LINES, {"apart": 0.5}])
    assert trained["figures"] == {"apart": 0.5}
    assert "disagree" not in trained  # it has a target for that


def test_a_model_that_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, quick: Any) -> None:
    monkeypatch.setattr(models, "CHILD", child(tmp_path, "raise ValueError('no such model')"))
    code, found = quick((MODEL,), "--threads", "2")
    assert code == 0
    assert found["rows"][0]["lacks"] == {"clearhead": "ValueError: no such model"}
    assert found["rows"][0]["targets"][0]["reached"] is None


def test_both_attentions_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paired, "settle", lambda: None)
    seen: list[str] = []
    found = list(models.turns(lambda name: lambda: seen.append(name), None, 3))
    assert seen == ["clearhead", "torch", "torch", "clearhead", "clearhead", "torch"]
    assert all(turn["torch"]["seconds"] >= 0 for turn in found)


def test_a_small_gpt_is_trained_with_either() -> None:
    *steps, last = models.train(replace(MODEL, work="train", tokens=24), 2)
    assert [set(turn) for turn in steps] == [{"clearhead", "torch"}] * 2
    assert last["apart"] < 1e-3


@pytest.mark.parametrize("work", ["prefill", "generate"])
def test_smollm2_is_run_with_either(work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AttentionInterface

    from clearhead.torch import huggingface
    from clearhead.trace import smollm2

    try:
        smollm2.package_folder()
    except ValueError as error:
        pytest.skip(f"the model comes as a package of its own: {error}")
    huggingface.register()
    for name in models.IMPLEMENTATIONS.values():  # set back afterwards
        monkeypatch.setitem(AttentionInterface._global_mapping, name, AttentionInterface._global_mapping[name])
    turn, last = models.smollm2(replace(MODEL, work=work), 1)
    assert all(0 < turn[name]["attention"] < turn[name]["seconds"] for name in models.IMPLEMENTATIONS)
    assert last["apart"] <= models.TOLERANCE["float32"]


# a whole run


ROWS = (
    replace(SMALL, mask="causal", beside=SMALL, targets=(Target("beside", at_most=1e9), Target("naive", at_least=1e9)),
            headline=True),
    replace(SMALL, name="one", threads=1, peers=(), targets=(Target("torch", at_least=1.0),)),
    startup.Start("new", ("start",), "a new process", "pass", targets=(Target("seconds", at_most=60.0),)),
)  # fmt: skip


def test_a_run_measures_every_row_and_says_what_falls_short(quick: Any, capsys: Any, tmp_path: Path) -> None:
    code, found = quick(ROWS, "--threads", "2")
    said = capsys.readouterr().out
    assert code == 0
    assert [(row["workload"], row["threads"]) for row in found["rows"]] == [("one", 1), ("small", 2), ("new", 2)]
    one, small, new = found["rows"]
    assert (
        len(small["seconds"]["clearhead"]) == len(small["seconds"]["beside"]) == len(new["seconds"]["clearhead"]) == 3
    )
    assert set(one["median"]) == {"clearhead"}
    assert "2 of 4 targets are met." in said
    assert "Short: small, 2 threads:" in said
    assert "Not measured: one, 1 thread:" in said

    file, readme, whole = tmp_path / "bench.json", tmp_path / "README.md", tmp_path / "performance.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n", encoding="utf-8")
    assert report.main([str(file), "--readme", str(readme), "--page", str(whole)]) == 0
    for row in found["rows"]:
        assert row["title"] in whole.read_text(encoding="utf-8")
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "old" not in text
    assert small["title"] in text
    assert one["title"] + " |" not in text  # no headline


def test_an_interrupted_run_keeps_what_is_there(quick: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    prepare = measure.paired.prepare

    def stops(*given: Any, **options: Any) -> Any:
        samples = prepare(*given, **options)
        turns = itertools.count()
        again = samples.repeat

        def repeat() -> None:
            if next(turns) == 1:
                raise KeyboardInterrupt
            again()

        samples.repeat = repeat
        return samples

    monkeypatch.setattr(measure.paired, "prepare", stops)
    code, found = quick(ROWS, "--threads", "2")
    assert code == 130
    assert len(found["rows"]) == 1
    assert len(found["rows"][0]["seconds"]["clearhead"]) == 1
    assert "Stopped before the end." in capsys.readouterr().err


def test_a_wrong_result_is_said_and_not_timed(quick: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    naive = peers.load("naive")
    monkeypatch.setattr(naive, "numbers", lambda result: np.zeros_like(result))
    code, found = quick(ROWS[:1], "--threads", "1")
    assert code == 1
    assert found["rows"][0]["disagree"] == ["naive"]
    assert "naive" not in found["rows"][0]["seconds"]
    assert "naive NumPy errs by" in capsys.readouterr().out


def test_wrong_usage_is_said(capsys: Any) -> None:
    for arguments in (["nonsense"], ["--threads", "0"], ["--peers", "nobody"]):
        with pytest.raises(SystemExit) as stopped:
            run.main(arguments)
        assert stopped.value.code == 2
    assert "no workload or group nonsense" in capsys.readouterr().err


def test_the_list_names_every_row(capsys: Any) -> None:
    assert run.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert all(row.name in said for row in workloads.ROWS)


# reports


def test_figures_without_ours_are_refused(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"peers": {"naive": {}}, "rows": []}), encoding="utf-8")
    assert report.main([str(file), "--print"]) == 1
    assert "this run measured naive alone" in capsys.readouterr().err


def test_a_text_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="the text has no"):
        report.between_marks("nothing here", "figures")


def test_the_pages_are_generated() -> None:
    """Both name the same machine and day."""
    whole = (ROOT / "docs/performance.md").read_text(encoding="utf-8")
    assert whole.startswith(page.TOP.partition("\n")[0])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (figures,) = re.findall(f"{report.BEGIN}(.*){report.END}", readme, flags=re.DOTALL)
    day = re.search(r"paired repetitions, (\d{4}-\d\d-\d\d)", figures)
    assert day
    assert day[1] in whole


@pytest.mark.parametrize("module", [targets, page, report])
def test_examples_run(module: Any) -> None:
    import doctest

    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


def test_missing_libraries_are_left_out(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(peers.MODULES, "absent", "peers.absent")
    assert importlib.util.find_spec("peers.absent") is None
    assert list(run.load(["absent", "naive"])) == ["naive"]
    assert "absent is left out" in capsys.readouterr().err


def test_threads_are_said_in_words() -> None:
    assert [show.threads(count) for count in (1, 2, "1")] == ["1 thread", "2 threads", "1 thread"]
