"""Client: sends requests to a server of `rfdlc serve`. Standard library and
numpy only.
"""

import base64
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from rfdlc.decisions.utility import Utility
from rfdlc.errors import InputError, expect, listing
from rfdlc.formats.cells import as_text

ATTEMPTS = 4  # when a server is busy
LONGEST_PAUSE = 5.0  # seconds between them


class Client:
    """A client of `rfdlc serve`, which tries a busy server again a few times.

    Parameters
    ----------
    url, token, timeout
        The address of the server, such as `http://127.0.0.1:8000`, its token, and the
        seconds to wait for a response.

    Examples
    --------
    >>> client = Client("http://127.0.0.1:8000")
    >>> client.decide(arrays=x)["action"]  # doctest: +SKIP
    ['healthy', 'ill']
    """

    def __init__(
        self, url: str, token: str | None = None, timeout: float = 30.0
    ) -> None:
        expect(
            url.startswith(("http://", "https://")),
            f"url {url!r}: expected http://HOST:PORT or https://HOST:PORT",
        )
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
        """Decide samples of exactly one kind; returns lists such as action,
        expected_utility and uncertainty.

        Parameters
        ----------
        images, arrays, rows, probabilities
            Image files (paths or contents), raw samples (N, ...), rows of a table (a
            data frame, lists of cells by column, or a list of rows), or probabilities
            (N, C) or (M, N, C) of any model.
        utility, full
            Another utility than the server's; whether to add classes, actions,
            probabilities and expected_utilities.
        """
        expect(
            not isinstance(images, str | Path | bytes),
            "images is one image: expected a list of paths or bytes",
        )
        question: dict[str, Any] = {
            "images": None if images is None else [_base64(image) for image in images],
            "arrays": None if arrays is None else _numbers("arrays", arrays),
            "rows": None if rows is None else _table(rows),
            "probabilities": (
                None
                if probabilities is None
                else _numbers("probabilities", probabilities)
            ),
        }
        given = {name: value for name, value in question.items() if value is not None}
        expect(
            len(given) == 1,
            f"{len(given)} kinds of samples were given: expected one of"
            f" {', '.join(question)}",
        )
        if utility is not None:
            given["utility"] = {
                **utility.to_dict(),
                "classes": list(utility.classes.names),
            }
        body = json.dumps(
            given, default=str
        ).encode()  # dates and the like are text in tables too
        return json.loads(
            self._request("/decide?full=true" if full else "/decide", body)
        )

    def ready(self) -> bool:
        """Whether the server accepts requests now."""
        with suppress(InputError):
            return bool(self._request("/ready", attempts=1))
        return False

    def metrics(self) -> str:
        """The server's metrics, in Prometheus' text format."""
        return self._request("/metrics").decode()

    def _request(
        self, path: str, body: bytes | None = None, attempts: int = ATTEMPTS
    ) -> bytes:
        request = urllib.request.Request(self.url + path, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            pause, detail = error.headers.get("Retry-After", "1"), error.reason
            with suppress(ValueError, KeyError, TypeError, OSError):
                detail = json.loads(error.read())["detail"]
            if error.code not in (429, 503) or attempts == 1:
                raise InputError(f"{self.url} answers {error.code}: {detail}") from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise InputError(
                f"{self.url} cannot be reached ({reason}): is `rfdlc serve` running"
                " there?"
            ) from None
        time.sleep(min(float(pause) if pause.isdigit() else 1.0, LONGEST_PAUSE))
        return self._request(path, body, attempts - 1)


def _table(rows: Any) -> Any:
    """As the server takes rows: cells by column, or a list of cells by column of each
    row.
    """
    if isinstance(rows, list | tuple):
        wrong = next((row for row in rows if not isinstance(row, Mapping)), None)
        expect(
            wrong is None,
            f"rows holds {wrong!r}: expected a {{column: cell}} for each row, or"
            " {column: cells}",
        )
        return [
            {
                name: cells[0]
                for name, cells in _columns({own: [row[own]] for own in row})
            }
            for row in rows
        ]
    return dict(_columns({name: list(rows[name]) for name in rows}))


def _columns(table: Mapping[Any, list[Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Cells by column; the numbers of lists, such as embeddings, are columns of their
    own, as in training.
    """
    for name, cells in table.items():
        if cells and isinstance(cells[0], list | tuple | np.ndarray):
            sizes = {np.size(cell) for cell in cells}
            expect(
                len(sizes) == 1,
                f"lists in column {name!r} have {listing(sorted(sizes))} numbers:"
                " expected as many each",
            )
            yield from (
                (f"{name}[{i}]", _cells(numbers))
                for i, numbers in enumerate(zip(*cells, strict=True))
            )
        else:
            yield str(name), _cells(cells)


def _numbers(name: str, values: Any) -> Any:
    found = np.asarray(values)
    wrong = np.argwhere(~np.isfinite(found if found.dtype.kind == "f" else np.zeros(0)))
    for place in map(tuple, wrong[:1]):
        raise InputError(
            f"{name}[{', '.join(map(str, place))}] is {found[place]}: expected finite"
            " numbers"
        )
    return found.tolist()


def _cells(column: Sequence[Any]) -> list[Any]:
    """Plain numbers and strings, also of a column of a data frame; what is missing is
    null.
    """
    return [
        None if as_text(cell) is None else cell
        for cell in np.asarray(column, dtype=object).tolist()
    ]


def _base64(image: str | Path | bytes) -> str:
    try:
        return base64.b64encode(
            image if isinstance(image, bytes) else Path(image).read_bytes()
        ).decode()
    except OSError as error:
        raise InputError(f"{image!r}: cannot be read ({error.strerror})") from None
