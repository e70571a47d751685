"""Our adaptations of Ray Tune's schedulers, and the private members that they use, in Tune."""

import json
import sys
from pathlib import Path

import pytest
import ray
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from attune.models.base import Range
from attune.platform.tuning.driver import ENVIRONMENT
from attune.platform.tuning.population import PRIVATE_MEMBERS, PopulationScheduler
from attune.platform.tuning.schedulers import NEVER, MedianScheduler
from attune.platform.tuning.trial import TASK, VALIDATION

pytestmark = pytest.mark.xdist_group("cluster")

MEMBERS, VALIDATIONS = 4, 3
RATES = Range(low=0.1, high=1.0)
TIME_LIMIT = 300  # seconds until an experiment that hangs is given up


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with pytest.MonkeyPatch.context() as patched:
        for name, value in ENVIRONMENT.items():
            patched.setenv(name, value)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import it
        # One core, so that trials report one after the other.
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


def report(number, validation, folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps(validation))
    metrics = {"valid_loss": 10.0 - number, VALIDATION: validation}
    tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))


def train_member(config):
    """Report validations; the last member ends before its second one."""
    task, done = config[TASK], 0
    folder = Path(task["folder"])
    with (folder.parent / f"{tune.get_context().get_trial_id()}.jsonl").open("a") as file:
        file.write(json.dumps(task) + "\n")
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as place:
            done = json.loads((Path(place) / "state.json").read_text())
    for validation in range(done + 1, VALIDATIONS + 1):
        if task["number"] == MEMBERS - 1 and validation > 1:
            return
        report(task["number"], validation, folder)


def train_trial(config):
    """Report validations; the first trial ends before its first one."""
    task = config[TASK]
    for validation in range(1, VALIDATIONS + 1 if task["number"] else 0):
        # The last trial is the worst.
        report(-(task["number"] // (MEMBERS + 1)), validation, Path(task["folder"]))


def run_experiment(trainable, scheduler, folder, count):
    tasks = [
        {"number": number, "folder": str(folder / str(number)), "settings": {"rate": 0.5}}
        for number in range(count)
    ]
    tuner = tune.Tuner(
        tune.with_resources(trainable, {"CPU": 1}),
        param_space={TASK: tune.grid_search(tasks)},
        tune_config=tune.TuneConfig(
            metric="valid_loss",
            mode="min",
            scheduler=scheduler,
            time_budget_s=TIME_LIMIT,
            reuse_actors=True,
        ),
        run_config=tune.RunConfig(storage_path=str(folder), name="experiment", verbose=0),
    )
    return list(tuner.fit())


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    """The results of a population in which the best member ends early, and the tasks of each."""
    folder = tmp_path_factory.mktemp("population")
    scheduler = PopulationScheduler({"rate": RATES})
    results = run_experiment(train_member, scheduler, folder, MEMBERS)
    files = sorted(folder.glob("*.jsonl"))
    return results, [[json.loads(line) for line in file.open()] for file in files]


def keeps_numbers_and_perturbs_settings(results, tasks):  # noqa: ARG001
    numbers = [{task["number"] for task in member} for member in tasks]
    rates = {task["settings"]["rate"] for member in tasks for task in member}
    return numbers == [{number} for number in range(MEMBERS)] and len(rates) > 1


def continues_without_the_ended_member(results, tasks):  # noqa: ARG001
    counts = sorted(result.metrics[VALIDATION] for result in results)
    return counts == [1, *[VALIDATIONS] * (MEMBERS - 1)]


BEHAVIOUR = {
    "_get_new_config": keeps_numbers_and_perturbs_settings,
    "_next_perturbation_sync": continues_without_the_ended_member,
}


@pytest.mark.parametrize("name", sorted(PRIVATE_MEMBERS))
def test_private_member_of_tune_behaves_as_expected(name, members):
    member = f"PopulationBasedTraining.{name} ({PRIVATE_MEMBERS[name]})"
    original = PopulationBasedTraining(hyperparam_mutations={"rate": [0.5]})
    assert hasattr(original, name), f"{member} does not exist in Ray {ray.__version__}"
    assert BEHAVIOUR[name](*members), f"{member} behaves differently in Ray {ray.__version__}"


def test_median_rule_stops_the_worst_trial(tmp_path):
    scheduler = MedianScheduler(time_attr=VALIDATION, grace_period=1, min_time_slice=NEVER)
    trials = run_experiment(train_trial, scheduler, tmp_path, MEMBERS + 2)
    counts = {trial.config[TASK]["number"]: trial.metrics.get(VALIDATION, 0) for trial in trials}
    assert counts == {0: 0, **dict.fromkeys(range(1, MEMBERS + 1), VALIDATIONS), MEMBERS + 1: 1}
