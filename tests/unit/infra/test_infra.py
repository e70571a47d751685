"""The files in infra/ against the official schemas, without a cluster or container engine."""

import json
import os
import re
import shlex
import tomllib
from pathlib import Path

import jsonschema
import pytest
import typer
import yaml

from attune.jobs import cli
from attune.platform.core.errors import UsageError
from attune.platform.runs.metrics_file import read_metrics
from attune.platform.training import engine, settings, setup, worker
from attune.platform.training.process_group import ProcessGroup

ROOT = Path(__file__).parents[3]
INFRA = ROOT / "infra"
LAUNCHERS = ("ray/on-premises.yaml", "ray/aws.yaml")
MANIFESTS = {"RayCluster": "kubernetes/raycluster.yaml", "RayJob": "kubernetes/rayjob.yaml"}
COMPOSE = "compose.yaml"
CONTAINERS = ("cpu", "cuda")
SCALES = sorted(path.stem for path in (INFRA / "deepspeed").iterdir())
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())


def read(name):
    return yaml.safe_load((INFRA / name).read_text())


@pytest.fixture(scope="module")
def schemas():
    folder = os.environ.get("ATTUNE_SCHEMAS")
    if not folder:
        pytest.skip("ATTUNE_SCHEMAS names no folder with KubeRay's and Compose's definitions")
    return Path(folder)


def strict(schema):
    """Return a custom resource's schema with unknown keys as errors; Kubernetes drops them."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(value) for key, value in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        closed["type"] = ["integer", "string"]
        closed.pop("anyOf", None)
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        closed["additionalProperties"] = bool(schema.get("x-kubernetes-preserve-unknown-fields"))
    return closed


def resource_schema(schemas, kind):
    text = (schemas / f"ray.io_{kind.lower()}s.yaml").read_text()
    definition = yaml.load(text, Loader=yaml.CSafeLoader)  # they are long
    [schema] = [
        version["schema"]["openAPIV3Schema"]
        for version in definition["spec"]["versions"]
        if version["name"] == "v1"
    ]
    schema["properties"]["metadata"]["x-kubernetes-preserve-unknown-fields"] = True
    return jsonschema.Draft7Validator(strict(schema))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_files_match_rays_schema(name):
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(read(name))
    validate_config(prepared)
    starts = prepared["head_start_ray_commands"] + prepared["worker_start_ray_commands"]
    assert all("RAY_AUTH_MODE=token" in line for line in starts if "ray start" in line)
    assert any("--dashboard-host=127.0.0.1" in line for line in starts)
    if ".venv" in str(prepared):  # jobs begin with `python`, which must be the one with Attune
        assert all(
            "PATH=~/attune/.venv/bin:$PATH" in line for line in starts if "ray start" in line
        )
    assert any(target.endswith(".ray/auth_token") for target in prepared["file_mounts"])
    with pytest.raises(jsonschema.ValidationError):
        validate_config({**prepared, "head_node": {}})


@pytest.mark.parametrize("kind", MANIFESTS)
def test_manifests_match_kuberays_schema(kind, schemas):
    manifest, schema = read(MANIFESTS[kind]), resource_schema(schemas, kind)
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", kind)
    schema.validate(manifest)
    manifest["spec"]["authOption"] = {}  # a slip of the pen
    with pytest.raises(jsonschema.ValidationError, match="authOption"):
        schema.validate(manifest)


@pytest.mark.parametrize("kind", MANIFESTS)
def test_manifests_require_a_token_and_expose_no_service(kind):
    spec = read(MANIFESTS[kind])["spec"]
    spec = spec.get("rayClusterSpec", spec)
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["rayVersion"] == PINS["ray"]
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    claim = read("kubernetes/storage.yaml")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert container["image"] == f"attune:{VERSION}-cuda"
        assert pod["securityContext"]["runAsNonRoot"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        home = volumes[mounts["/attune"]]["persistentVolumeClaim"]["claimName"]
        assert home == claim["metadata"]["name"]
        assert set(mounts.values()) == set(volumes)
        assert {"name": "ATTUNE_HOME", "value": "/attune"} in container["env"]


def test_the_compose_file_matches_the_schema(schemas):
    schema = jsonschema.Draft7Validator(json.loads((schemas / "compose-spec.json").read_text()))
    content = read(COMPOSE)
    schema.validate(content)
    content["services"]["mlflow"]["port"] = []
    with pytest.raises(jsonschema.ValidationError, match="port"):
        schema.validate(content)


def test_compose_publishes_ports_on_loopback_only():
    services = read(COMPOSE)["services"]
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert {port.split(":")[-1] for port in published} == {"5000", "7860", "8265"}
    assert all(port.startswith("127.0.0.1:") for port in published)
    assert not any("network_mode" in service for service in services.values())


def test_files_and_services_in_compose_exist():
    content = read(COMPOSE)
    services = content["services"]
    for name, service in services.items():
        assert ("build" in service) == (service["image"] == f"attune:{VERSION}-cpu"), name
        if "build" in service:
            built = (INFRA / service["build"]["context"] / service["build"]["dockerfile"]).resolve()
            assert built == INFRA / "containers/cpu.Containerfile"
        assert set(service.get("depends_on", {})) <= set(services)
        assert set(service.get("secrets", ())) <= set(content["secrets"])
        assert {c["source"] for c in service.get("configs", ())} <= set(content["configs"])
        used = {volume.split(":")[0] for volume in service.get("volumes", ())}
        assert used <= set(content["volumes"]), name
        if "healthcheck" not in service:
            assert name in ("bucket", "ray-worker")
    # Otherwise each worker would claim all cores of the machine.
    assert "--num-cpus=" in services["ray-worker"]["command"]
    for name in ("ray-head", "ray-worker", "page"):
        environment = services[name]["environment"]
        assert environment["RAY_AUTH_MODE"] == "token"
        assert environment["RAY_AUTH_TOKEN_PATH"] == "/run/secrets/ray_token"
        assert environment["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"


def test_clients_can_reach_mlflow_in_compose():
    service = read(COMPOSE)["services"]["mlflow"]
    words = shlex.split(service["command"])
    assert words[words.index("--allowed-hosts") + 1].split(",")[0] == "mlflow:5000"
    assert words[words.index("--app-name") + 1] == "basic-auth"
    assert "--artifacts-destination" in words
    assert service["environment"]["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    # /health also answers hosts that every other path rejects.
    assert "http://mlflow:5000/api/" in service["healthcheck"]["test"][1]


def test_files_contain_no_secret():
    for path in INFRA.rglob("*.yaml"):
        for name, value in re.findall(r"(\w*(?:PASSWORD|SECRET|KEY)): (.+)", path.read_text()):
            assert value.startswith("${") or "ACCESS_KEY" in name, (path, name)


@pytest.mark.parametrize("name", CONTAINERS)
def test_container_files_copy_existing_files(name):
    text = (INFRA / f"containers/{name}.Containerfile").read_text()
    sources = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert set(packages["package-dir"].values()) <= set(sources)
    assert re.findall(r"^FROM (python\S*)", text, re.MULTILINE) == ["python:3.11-slim-bookworm"]
    installs = re.findall(r"pip install [^\\\n]*", text)
    assert len(installs) == 3
    assert all("--constraint constraints.txt" in install for install in installs)
    # torch is installed before packages that require a version range of it.
    assert re.search(r"\btorch\b", installs[0])
    assert "USER ray" in text


def commands():
    """Return each command line in infra/, from comments, entry points and commands, as one line."""
    for path in [*sorted(INFRA.rglob("*.yaml")), INFRA / "README.md"]:
        text = re.sub(r"\n\s*(?:#\s*)?(?=--)", " ", path.read_text())
        for line in re.findall(r"(?<![\w/.:-])((?:attune|ray|mlflow) [a-z][^#`\n\"';]*)", text):
            yield path.name, shlex.split(line)


def options_of(program, words):
    """Check a command and its options against the help of the real program."""
    command = program
    while hasattr(command, "commands"):
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in parameter.opts}
    options = {word.split("=")[0] for word in words if word.startswith("--") and word != "--"}
    return options - known


def test_commands_and_their_options_exist():
    from mlflow.cli import cli as mlflow
    from ray.scripts.scripts import cli as ray

    attune = typer.main.get_command(cli.app)
    programs = {"attune": attune, "mlflow": mlflow, "ray": ray}
    seen = set()
    for name, (program, *words) in commands():
        if "--" in words:  # `attune submit -- train ...`
            place = words.index("--")
            assert not options_of(attune, words[place + 1 :]), (name, words)
            words = words[:place]
        assert not options_of(programs[program], words), (name, words)
        seen.add((program, words[0]))
    assert {("attune", "train"), ("attune", "ui"), ("attune", "submit")} <= seen
    assert {("ray", "start"), ("ray", "up"), ("mlflow", "server")} <= seen
    assert options_of(attune, ["train", "x", "--wrkers", "2"]) == {"--wrkers"}


def test_the_job_trains_a_known_variant():
    words = shlex.split(read(MANIFESTS["RayJob"])["spec"]["entrypoint"])
    overrides = dict(word.split("=") for word in words if "=" in word)
    _, training = settings.configure(words[2], words[words.index("--preset") + 1], overrides)
    assert training.deepspeed in SCALES


@pytest.mark.parametrize("scale", SCALES)
def test_deepspeed_accepts_the_settings(scale):
    from deepspeed.runtime.config import DeepSpeedConfig

    extra = engine.read_deepspeed_settings(scale)
    stage = extra[engine.ZERO]["stage"]
    training = settings.TrainingConfig(gradient_clipping=2.0, accumulation=3)
    config = DeepSpeedConfig(engine.deepspeed_settings(training, zero=stage, extra=extra))
    assert config.zero_config.stage == stage
    assert (config.gradient_clipping, config.gradient_accumulation_steps) == (2.0, 3)
    for key, value in extra[engine.ZERO].items():
        if not isinstance(value, dict):
            assert getattr(config.zero_config, key) == value


def trained(prepared, name, **asked):
    run = setup.new_run("dummy", data=str(prepared), preset="tiny", max_steps=4, name=name, **asked)
    assert worker.train(run, ProcessGroup())
    return run, [line["metrics"]["valid_loss"] for line in read_metrics(run.metrics_file)[-1:]]


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTUNE_HOME", str(tmp_path / "home"))
    return tmp_path


@pytest.mark.usefixtures("home")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_sharded_and_offloaded_weights_give_the_same_losses(prepared):
    _, expected = trained(prepared, "plain")
    for scale, stage in (("one-gpu-offload", 2), ("many-nodes", 3)):
        run, actual = trained(prepared, scale, overrides={"deepspeed": scale})
        assert run.zero == stage
        assert (
            engine.load_deepspeed_settings(run.folder)[engine.ZERO]["offload_optimizer"]["device"]
            == "cpu"
        )
        assert actual == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable as JSON"),
        ("[]", "JSON object"),
        ('{"zero_optimization": {"stages": 2}}', r"'zero_optimization\.stages'"),
        ('{"zero_optimization": {"offload_optimizer": {"device": "gpu"}}}', "offload_optimizer"),
        (
            '{"gradient_clipping": 1.0}',
            r"remove 'gradient_clipping' and use --set gradient_clipping",
        ),
        ('{"zero_optimisation": {}}', "did you mean 'zero_optimization'"),
        ('{"zero_optimization": {"stage": 2}}', "--zero 1, but deepspeed=.* says stage 2"),
    ],
)
def test_wrong_deepspeed_settings_are_errors(content, message, home, prepared):
    path = home / "mine.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        setup.new_run("dummy", data=str(prepared), zero=1, overrides={"deepspeed": str(path)})


@pytest.mark.usefixtures("home")
def test_missing_deepspeed_settings_are_errors(prepared):
    with pytest.raises(UsageError, match="did you mean 'many-nodes'"):
        setup.new_run("dummy", data=str(prepared), overrides={"deepspeed": "many-node"})
    with pytest.raises(UsageError, match="cannot be trained with --zero 3"):
        setup.new_run("multi-trs", data=str(prepared), overrides={"deepspeed": "many-nodes"})
