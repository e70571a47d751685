"""The code of a logged model, run by `mlflow.pyfunc.load_model(...)`.

MLflow copies this file beside the model's folder and executes the copy (a "model from code"), so
that nothing is pickled.
"""

from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped]
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel, PythonModelContext

from attune.platform.serving.responder import Responder


class LoggedModel(PythonModel):
    """Answers the conversations in the column `context`: lists of turns, or single turns."""

    def load_context(self, context: PythonModelContext) -> None:
        """Load the weights once."""
        self.responder = Responder(Path(context.artifacts["model"]))

    def predict(
        self,
        context: PythonModelContext,
        model_input: pd.DataFrame,
        params: dict[str, Any] | None = None,
    ) -> list[str]:
        """Return the greedy answer to each row."""
        turns = pd.DataFrame(model_input)["context"]
        conversations = [[row] if isinstance(row, str) else list(row) for row in turns]
        return [answer.text for answer in self.responder.respond(conversations)]


set_model(LoggedModel())
