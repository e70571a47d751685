"""The learning curves of runs."""

from types import SimpleNamespace

from matplotlib.figure import Figure

from attune.platform.evaluation import figures


def test_curve_of_a_generator_starts_with_its_stage(monkeypatch):
    perplexities = {630: 141.0, 945: 93.0, 1260: 60.0}
    lines = [{"step": 315, "metrics": {"valid_emotion_accuracy": 0.3}}]
    lines += [{"step": n, "metrics": {"valid_perplexity": p}} for n, p in perplexities.items()]
    monkeypatch.setattr(figures, "read_metrics", lambda _: lines)
    run = SimpleNamespace(name="one", metrics_file=None, result={"best_step": 1260})
    axes = Figure().subplots()
    figures._draw_curve(axes, run, figures._read_validations(run, "valid_perplexity"), "C0")
    curve, best = axes.lines
    assert list(curve.get_xdata()) == [630, 945, 1260]
    assert list(best.get_ydata()) == [60.0]
