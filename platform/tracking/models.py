"""A run's model in MLflow: logged and registered."""

import contextlib
import tempfile
from pathlib import Path

import mlflow.pyfunc
from mlflow import MlflowClient
from mlflow.entities import LoggedModelOutput
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.types.schema import AnyType, ColSpec, DataType, Schema

from attune.models.base import DialogueVariant
from attune.platform.core.settings import find_variant
from attune.platform.runs.record import Run
from attune.platform.tracking import run_metadata
from attune.platform.tracking.connection import ADDRESS
from attune.platform.tracking.environment import temporary_variables

MODEL_CODE = Path(__file__).with_name("logged_model.py")


def log_model(client: MlflowClient, run_id: str, run: Run) -> str | None:
    """Log the model for `mlflow.pyfunc.load_model`; register it if the run is finished. A model
    that is registered already is left as it is."""
    variant, _ = find_variant(run.variant)
    if registered := _find_registered(client, run_id, run.variant):
        return registered
    if not issubclass(variant, DialogueVariant):  # a classifier does not answer
        client.log_artifact(run_id, str(run.model))
        return None
    experiment = client.get_run(run_id).info.experiment_id
    logged_model = client.create_logged_model(
        experiment,
        name=run.name,
        source_run_id=run_id,
        params=run_metadata.run_params(run),
        model_type="attune",
    )
    model_id = str(logged_model.model_id)
    step = run.result.get("best_step") or 0
    client.log_outputs(run_id, models=[LoggedModelOutput(model_id, step)])
    context = ColSpec(AnyType(), "context")  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        place = logged_model.artifact_location
        mlflow.pyfunc.save_model(
            path=str(path),
            python_model=str(MODEL_CODE),
            artifacts={"model": str(run.model)},
            signature=ModelSignature(Schema([context]), Schema([ColSpec(DataType.string)])),
            input_example=[{"context": ["My dog is ill."]}],
            pip_requirements=["attune"],  # set, so that MLflow does not infer them with pip
            mlflow_model=Model(place, run_id, model_uuid=model_id, model_id=model_id),
        )
        client.log_model_artifacts(model_id, str(path))
    client.finalize_logged_model(model_id, "READY")
    if run.status == "finished":
        add_version(client, run.variant, run_metadata.describe_variant(run.variant), run, model_id)
    return model_id


def _find_registered(client: MlflowClient, run_id: str, name: str) -> str | None:
    """Return the id of a run's model if it is a version of the registered model of that name."""
    versions = client.search_model_versions(f"run_id = '{run_id}'")
    return next((str(each.model_id) for each in versions if each.name == name), None)


def add_version(
    client: MlflowClient, name: str, description: str, run: Run, model_id: str
) -> ModelVersion:
    """Register a run's model as a new version; create the registered model if needed."""
    with contextlib.suppress(MlflowException):  # it exists; other errors recur in the next call
        client.create_registered_model(name, description=description)
    # A local registry finds the logged model in the store that the environment names.
    with temporary_variables({ADDRESS: client.tracking_uri}):
        return client.create_model_version(
            name,
            f"models:/{model_id}",
            run_id=run.run_id,
            model_id=model_id,
            description=f"{run.name}: {run_metadata.describe_outcome(run)}",
        )
