"""Client: asks a server of `rfdlc serve`. Standard library and numpy only."""

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rfdlc.data.table import as_text
from rfdlc.decide.utility import Utility
from rfdlc.errors import InputError

TRIES = 4  # when a server is busy
LONGEST_PAUSE = 5.0  # seconds between them


class Client:
    """`Client("http://127.0.0.1:8000", token="...").decide(arrays=x)`; a busy server is asked again a few times."""

    def __init__(self, url: str, token: str | None = None, timeout: float = 30.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise InputError(f"url {url!r}: expected http://HOST:PORT or https://HOST:PORT")
        self.url, self.timeout = url.rstrip("/"), timeout
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"

    def decide(
        self,
        *,
        images: Sequence[str | Path | bytes] | None = None,
        arrays: Any = None,
        rows: Any = None,
        probabilities: Any = None,
        utility: Utility | None = None,
        full: bool = False,
    ) -> dict[str, Any]:
        """Actions of image files (paths or bytes), arrays, rows of a table, or probabilities; give one of them.

        Rows are a data frame, or lists of cells by column.

        Columns with one entry per sample: action, expected_utility, argmax, probability, uncertainty and
        mutual_information; `full` adds classes, actions, probabilities and expected_utilities.
        """
        if isinstance(images, str | Path | bytes):
            raise InputError("images is one image: expected a list of paths or bytes, also of a single one")
        question: dict[str, Any] = {
            "images": None if images is None else [_base64(image) for image in images],
            "arrays": None if arrays is None else np.asarray(arrays).tolist(),
            "rows": None if rows is None else {str(name): _cells(rows[name]) for name in rows},
            "probabilities": None if probabilities is None else np.asarray(probabilities).tolist(),
        }
        given = {name: value for name, value in question.items() if value is not None}
        if len(given) != 1:
            raise InputError(f"{len(given)} kinds of samples were given: expected one of {', '.join(question)}")
        if utility is not None:
            table = utility.to_dict()
            given["utility"] = {**table, "classes": list(utility.classes.names)}
        body = json.dumps(given, default=str).encode()  # dates and the like are text in tables too
        answer: dict[str, Any] = json.loads(self._ask("/decide" + ("?full=true" if full else ""), body))
        return answer

    def ready(self) -> bool:
        """Whether the server takes requests now."""
        try:
            with urllib.request.urlopen(f"{self.url}/ready", timeout=self.timeout) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def metrics(self) -> str:
        """The server's figures, in Prometheus' text format."""
        return self._ask("/metrics", None).decode()

    def _ask(self, path: str, body: bytes | None) -> bytes:
        for attempt in range(TRIES):
            request = urllib.request.Request(self.url + path, body, self._headers)
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    answer: bytes = response.read()
                    return answer
            except urllib.error.HTTPError as error:
                if error.code not in (429, 503) or attempt == TRIES - 1:
                    raise InputError(f"{self.url} answers {error.code}: {_detail(error)}") from None
                time.sleep(_pause(error))
            except OSError as error:
                reason = getattr(error, "reason", error)
                raise InputError(f"{self.url} cannot be asked ({reason}): is `rfdlc serve` running there?") from None
        raise AssertionError("the last attempt returns or raises")


def _cells(column: Sequence[Any]) -> list[Any]:
    """Plain numbers and texts, also of a column of a data frame; what is missing is null."""
    cells = np.asarray(column, dtype=object).tolist()
    return [None if as_text(cell) is None else cell for cell in cells]


def _base64(image: str | Path | bytes) -> str:
    if isinstance(image, bytes):
        return base64.b64encode(image).decode()
    try:
        return base64.b64encode(Path(image).read_bytes()).decode()
    except OSError as error:
        raise InputError(f"{image}: cannot be read ({error.strerror})") from None


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["detail"])
    except (ValueError, KeyError, TypeError, OSError):
        return error.reason


def _pause(error: urllib.error.HTTPError) -> float:
    try:
        return min(float(error.headers.get("Retry-After", 1)), LONGEST_PAUSE)
    except ValueError:
        return 1.0
