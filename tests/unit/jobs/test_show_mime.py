"""MIME's figures and controls on the command line."""

import dataclasses

import pytest
import torch

from attune.platform.runs.model import load_model, save_model
from attune.platform.runs.record import find_run
from tests.commands import error_of, json_output

FEW = ("--set", "max_tokens=3")


@pytest.fixture
def mimics(home, build):
    """Add two runs of MIME to the home, one without mimicry."""
    for name, variant in (("with", "mime"), ("without", "mime-no-mimicry")):
        folder = home / "runs" / name
        run = dataclasses.replace(find_run("first"), name=name, folder=folder, variant=variant)
        run.write()
        save_model(build(variant), run.model)
    return home


@pytest.fixture
def loud(mimics):
    """Scale up the emotion embeddings: those of an untrained model do not change its answers."""
    model = load_model(find_run("with").model)
    with torch.no_grad():
        model.variant.emotions.weight *= 100.0
    save_model(model, mimics / "runs" / "with" / "model")


@pytest.mark.usefixtures("mimics")
def test_show_embeddings(call, tmp_path):
    out = tmp_path / "pictures" / "figure.png"
    done = json_output(call("show", "embeddings", "with", "without", "--out", out, "--json"))
    assert done["picture"] == str(out)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert [one["variant"] for one in done["runs"]] == ["mime", "mime-no-mimicry"]
    assert all(-0.2 < one["separation"] < 0.2 for one in done["runs"])  # untrained
    assert "name a run of mime or" in error_of(call("show", "embeddings", "first"))
    assert "ending in .png" in error_of(call("show", "embeddings", "with", "--out", "figure.xyz"))


def test_separated_emotion_groups_have_a_higher_separation(call, mimics):
    model = load_model(find_run("with").model)
    with torch.no_grad():
        model.variant.emotions.weight[model.variant.groups["positive"]] += 1.0
    save_model(model, mimics / "runs" / "with" / "model")
    one, other = json_output(call("show", "embeddings", "with", "without", "--json"))["runs"]
    assert one["separation"] > 0.5 > other["separation"]


@pytest.mark.usefixtures("loud")
def test_show_stochasticity(call):
    done = json_output(call("show", "stochasticity", "with", "--count", 4, "--json"))
    assert len(done["answers"]) == 4
    differing = [one for one in done["answers"] if one["with"] != one["without"]]
    assert done["differing"] == len(differing) / 4
    assert differing
    assert done == json_output(call("show", "stochasticity", "with", "--count", 4, "--json"))
    assert "multi-trs has no controls" in error_of(call("show", "stochasticity", "second"))
    assert "unknown split 'tset'" in error_of(
        call("show", "stochasticity", "with", "--split", "tset")
    )


@pytest.mark.usefixtures("loud")
def test_controls_are_validated_and_change_answers(call):
    ask = ("respond", "with", "--context", "I won!", *FEW)
    calm = json_output(call(*ask, "--json"))["answers"][0]
    assert set(calm["explanation"]["response_emotion"]) == {"positive", "negative"}
    assert calm["explanation"]["words"] == ["i", "won", "!"]
    assert len(calm["explanation"]["by_word"]["gate mimicking"]) == 3
    seeds = [("--control", "stochasticity=on", "--control", f"seed={n}") for n in range(4)]
    texts = {json_output(call(*ask, *seed, "--json"))["answers"][0]["answer"] for seed in seeds}
    assert len(texts) > 1
    for inputs, message in (
        ("stochasticity=maybe", "unknown value of stochasticity 'maybe'"),
        ("stochastic=on", "did you mean 'stochasticity'"),
        ("on", "--control on: expected KEY=VALUE"),
    ):
        assert message in error_of(call(*ask, "--control", inputs))
    wrong = call("respond", "with", "second", "--context", "Hi.", "--control", "seed=1")
    assert "multi-trs has no controls" in error_of(wrong)
    kept = {
        json_output(call("evaluate", "with", *FEW, *more, "--json"))["answers"]
        for more in ((), ("--control", "stochasticity=on"))
    }
    assert len(kept) == 2
