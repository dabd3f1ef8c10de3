"""What one request may ask for, and how a request is refused."""

from dataclasses import dataclass

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Limits:
    """Every wait and every buffer has an end."""

    requests: int = 256  # accepted and not answered yet; more get 429
    batch: int = 128  # samples computed together
    samples: int = 256  # in one request
    body: int = 16 * MEBIBYTE  # bytes of one request
    held: int = 256 * MEBIBYTE  # bytes of all requests that are not answered yet; more get 429
    pixels: int = 25_000_000  # of one image, before it is decoded
    headers: int = 32_768  # bytes
    seconds: float = 10.0  # to send a request, and again to answer it


class Refused(Exception):
    """A request that gets an answer with this status. The message never repeats what was sent."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.retry_after = status, message, retry_after
