"""The picture of how runs learned."""

from types import SimpleNamespace

from matplotlib.figure import Figure

from attune.jobs import curves


def test_a_generator_is_shown_from_its_own_stage_on(monkeypatch):
    looks = {630: 141.0, 945: 93.0, 1260: 60.0}
    lines = [{"step": 315, "metrics": {"valid_emotion_accuracy": 0.3}}]
    lines += [{"step": step, "metrics": {"valid_perplexity": p}} for step, p in looks.items()]
    monkeypatch.setattr(curves, "read_metrics", lambda _: lines)
    run = SimpleNamespace(name="one", metrics_file=None, result={"best_step": 1260})
    axes = Figure().subplots()
    curves._draw(axes, run, curves._looks(run, "valid_perplexity"), "C0")
    drawn, best = axes.lines
    assert list(drawn.get_xdata()) == [630, 945, 1260]
    assert list(best.get_ydata()) == [60.0]
