"""The picture of learning rates and dropout over whole runs."""

import pytest

from attune.jobs.rates import plan_rates
from attune.platform.evaluation.figures import draw_schedules


def test_a_schedule_covers_every_step_of_every_stage(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path))
    generator, critics, adversarial = plan_rates("empdg", str(prepared), "compact")
    assert [s.name for s in (generator, critics, adversarial)] == [
        "generator", "critics", "adversarial",
    ]  # fmt: skip
    assert max(generator.rates) == pytest.approx(1e-3)
    assert generator.rates[-1] < 1e-5
    assert set(critics.rates[50:]) == {0.3e-3}
    assert max(adversarial.rates) < 0.11e-3
    for stage in (generator, critics, adversarial):
        assert len(stage.rates) == len(stage.dropout)
        assert (stage.dropout[0], stage.dropout[-1]) == (1.0, 0.0)
    draw_schedules({"empdg": [generator, critics, adversarial]}, tmp_path / "rates.png")
    assert (tmp_path / "rates.png").stat().st_size
