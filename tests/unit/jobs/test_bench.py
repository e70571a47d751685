"""The reference implementations of the benchmarks give the same results; measurements are right."""

import itertools
import json

import pytest
import torch

from attune.jobs.bench import curation, generation, stopping, systems, training, tuning
from attune.models.decoding import Decoding
from attune.platform.batching.encoding import encode
from attune.platform.curation import subtitles
from attune.platform.evaluation.evaluate import answer


@pytest.fixture
def variant(build):
    return build("multi-trs", label_smoothing=training.SMOOTHING, dropout=0.0).variant


def test_all_loops_compute_the_same_gradient(variant, batch):
    variant.train()
    ours = training._benchmark_our_loss(variant, batch)
    assert torch.allclose(training._benchmark_good_loss(variant, batch), ours, rtol=1e-5)

    def gradient(loss):
        [grad] = torch.autograd.grad(loss, [variant.output.bias])
        return grad

    # The papers' target gives padding no probability; its entropy, left out here, has no gradient.
    papers, expected = gradient(training._benchmark_reference_loss(variant, batch)), gradient(ours)
    assert torch.allclose(papers / batch.tokens, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("slow", "method"),
    [
        (generation._generate_reference_greedily, "greedy"),
        (generation._generate_reference_by_beams, "beam"),
    ],
)
def test_reference_decoding_gives_the_same_answers(build, test_samples, vocabulary, slow, method):
    variant = build("transformer").variant.eval()
    columns = encode(test_samples.head(6), vocabulary)
    decoding = Decoding(method=method, max_tokens=8, beams=3)
    ours = answer(variant, columns, decoding)
    assert generation._generate_one_by_one(variant, columns, decoding, slow) == ours
    assert any(ours)


def test_trial_overhead_and_the_steps_that_stopping_saves(tmp_path, monkeypatch):
    """A bare run takes 1 s per step, trials take 2 s and are 5 s apart; ASHA stops half of them."""

    def write_metrics(name, start, steps, pace):
        folder = (
            tmp_path / ("stopping" if name[:4] in ("none", "asha") else "tuning") / "runs" / name
        )
        folder.mkdir(parents=True)
        lines = [
            {"step": n, "time": 1000 * (start + n * pace), "metrics": {}}
            for n in range(1, steps + 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    def run_attune_command(_, command, *arguments):
        name = arguments[arguments.index("--name") + 1]
        if command == "train":
            write_metrics(name, 0, 11, 1)
        elif name == "bench":
            for number in range(tuning.TRIALS):
                write_metrics(f"bench-{number:03d}", number * (20 + 5) - 2, 11, 2)
        else:
            for number in range(stopping.SAMPLES):
                write_metrics(
                    f"{name}-{number:03d}", 0, 4 if name == "asha" and number % 2 else 12, 1
                )
        return {"best": {"metrics": {"valid_perplexity": 40.0}}}

    monkeypatch.setattr(tuning, "run_attune_command", run_attune_command)
    monkeypatch.setattr(stopping, "run_attune_command", run_attune_command)
    report = tuning.measure_tuning(tmp_path, tmp_path)
    assert report["seconds_between_trials"] == [5.0] * (tuning.TRIALS - 1)
    assert (report["bare_seconds"], report["trial_seconds"]) == (10.0, 20.0)
    assert report["overhead_of_five_minutes"] == pytest.approx(2 * (1 + 5 / 300) - 1)
    saved = stopping.measure_stopping(tmp_path, tmp_path)
    steps = {name: each["steps"] for name, each in saved.items()}
    assert steps == {"none": 16 * 12, "asha": 8 * 12 + 8 * 4}


def test_synthetic_subtitles_are_readable_and_both_worker_counts_are_measured(
    prepared, tmp_path, monkeypatch
):
    monkeypatch.setattr(curation, "FILES", 2)
    monkeypatch.setattr(curation, "LINES", 5)
    commands = []

    def run_attune_command(_, *arguments):
        commands.append(arguments)
        workers = arguments[arguments.index("--workers") + 1] if "--workers" in arguments else "0"
        return {"hash": "same", "speed": {"lines_per_second": 10.0 * int(workers)}}

    monkeypatch.setattr(curation, "run_attune_command", run_attune_command)
    report = curation.measure_curation(prepared, tmp_path)
    assert {n: [each["lines_per_second"] for each in turns] for n, turns in report.items()} == {
        "1": [10.0] * curation.TURNS, "2": [20.0] * curation.TURNS,
    }  # fmt: skip
    assert commands[0][:2] == ("data", "turns")
    films = subtitles.find_subtitles(tmp_path / "curation" / "films")
    for lines in map(subtitles.read_subtitles, films):
        assert len(lines) == 5
        assert all(line.end - line.start == pytest.approx(2.0) for line in lines)
        assert all(after.start > line.end for line, after in itertools.pairwise(lines))
    assert len(films) == 2


def test_systems_alternate_with_the_reference_and_the_base_commit(tmp_path, monkeypatch):
    order = []

    def run_attune_command(home, _, system, *arguments, environment):
        precision = next(each for each in arguments if each.startswith("precision="))
        order.append((system, arguments[1], precision, environment is not None))
        (home / "bench").mkdir()
        return {"checkpoint": str(home / "bench" / "model")}

    def measure_training_run(_):
        system = order[-1][0]
        rate = {"multi-trs": 100.0, "moel": 70.0}[system] * (0.5 if order[-1][3] else 1.0)
        return {"samples_per_second": rate, "peak_memory_mb": 1000.0}

    monkeypatch.setattr(systems, "run_attune_command", run_attune_command)
    monkeypatch.setattr(systems, "measure_training_run", measure_training_run)
    monkeypatch.setattr(systems, "SYSTEMS", ("multi-trs", "moel"))
    results = systems.measure_systems(tmp_path, tmp_path, "HEAD")
    assert not (tmp_path / "base").exists()
    assert [each for each in order if each[1] == "paper"][-3:] == [
        ("moel", "paper", "precision=auto", False),
        ("multi-trs", "paper", "precision=auto", False),
        ("moel", "paper", "precision=fp32", True),
    ]
    summary = systems.summarize_systems(results["paper"]["moel"])
    assert (summary["ratio_to_reference"], summary["ratio_to_base"]) == (0.7, 2.0)
    assert "ratio_to_base" not in systems.summarize_systems(results["compact"]["moel"])


def test_the_speed_of_a_run_is_measured_in_its_last_stage(tmp_path):
    lines = [(1, 0, 0), (20, 1_000, 0), (21, 9_000, 1), (41, 10_000, 1), (61, 12_000, 1)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": step, "time": time, "metrics": {"loss": 1.0, "stage": stage}})
            + "\n"
            for step, time, stage in lines
        )
    )
    record = {"training": {"batch_size": 16}, "result": {"peak_memory_mb": 900.0}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    expected = {"samples_per_second": 16 * 20 / 2, "peak_memory_mb": 900.0}
    assert training.measure_training_run(tmp_path) == expected
