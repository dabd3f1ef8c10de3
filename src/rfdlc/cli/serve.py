"""`rfdlc serve`: one model behind HTTP."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rfdlc.cli.reading import folder_decider
from rfdlc.cli.request import UtilityRequest, takes_request
from rfdlc.errors import InputError

if TYPE_CHECKING:
    from rfdlc.decide.classes import Classes
    from rfdlc.decide.decider import Decider


@takes_request
def serve(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A run folder, or a `.onnx` file of `rfdlc export`.")],
    request: UtilityRequest,
    host: Annotated[str, typer.Option("--host", help="Other than loopback only with a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with the token that requests must carry.")
    ] = None,
    queue: Annotated[int, typer.Option("--queue", min=1, help="Requests that may wait; more get 429.")] = 256,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Samples computed together.")] = 128,
    seconds: Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to send, and to answer.")] = 10.0,
    quiet: Annotated[bool, typer.Option("--quiet", help="No log line for each request.")] = False,
) -> None:
    """Answer POST /decide with actions; GET /health, /ready, /metrics and /docs too. Logs are JSON lines.

    **Examples**

    - `rfdlc serve runs/a --utility U.csv`
    - `rfdlc serve model.onnx --port 9000`
    - `rfdlc serve runs/a --host 0.0.0.0 --token-file token.txt`
    """
    from rfdlc.integrations.server.limits import Limits
    from rfdlc.integrations.server.serving import serve as serve_it

    chosen = request.read_utility(lambda: _classes(model), lambda: _decider(model))
    limits = Limits(requests=queue, batch=batch, seconds=seconds)
    serve_it(model, utility=chosen, host=host, port=port, token_file=token_file, limits=limits, quiet=quiet)


def _classes(model: Path) -> "Classes":
    """Those of the model, for a utility that is built or matched by name."""
    from rfdlc.decide.classes import Classes
    from rfdlc.integrations.onnx.model import OnnxModel

    if model.suffix == ".onnx":
        return OnnxModel.load(model).classes
    if not (model / "classes.json").is_file():
        raise InputError(f"{model} cannot be served: expected a run folder, or a file of `rfdlc export` (.onnx)")
    return Classes.from_json(model / "classes.json")


def _decider(model: Path) -> "Decider | None":
    """The one that the model brings along."""
    from rfdlc.integrations.onnx.model import OnnxModel

    return OnnxModel.load(model).decider if model.suffix == ".onnx" else folder_decider(model)
