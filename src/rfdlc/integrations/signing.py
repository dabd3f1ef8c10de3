"""Signed artefacts: who made an exported file or a run folder, which a checksum inside
it cannot say.
"""

import base64
import json
from pathlib import Path
from typing import Any

from rfdlc.errors import InputError, expect, listing
from rfdlc.files import read_json, replacing, sha256_of

FORMAT, VERSION, ALGORITHM = "rfdlc-signature", 1, "ed25519"
INSIDE, LOCK = "signature.json", ".lock"
KEY = (
    "expected an Ed25519 key in a PEM file, as `openssl genpkey -algorithm ed25519`"
    " writes it"
)


def sign(path: str | Path, key: str | Path) -> Path:
    """Sign an exported file or a run folder; returns the signature, `FILE.sig` beside
    it or `signature.json` inside.

    Parameters
    ----------
    path : str or Path
        A file, or a folder, all of whose files are signed.
    key : str or Path
        A private Ed25519 key in a PEM file without a password.

    Examples
    --------
    >>> sign("model.onnx", "key.pem")  # doctest: +SKIP
    PosixPath('model.onnx.sig')
    """
    private = _read_key(key, private=True)
    table: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "algorithm": ALGORITHM,
        "files": _digests(path),
    }
    table["signature"] = base64.b64encode(private.sign(_message(table))).decode()
    place = signature_of(path)
    with replacing(place) as beside:
        beside.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    return place


def verify(path: str | Path, public_key: str | Path) -> int:
    """The number of files that were signed with the key; raises InputError where one
    was changed, added or removed.

    Parameters
    ----------
    path : str or Path
        A file or a folder that `sign` signed.
    public_key : str or Path
        The public key in a PEM file, from a source that you trust.
    """
    public, place = _read_key(public_key, private=False), signature_of(path)
    from cryptography.exceptions import (
        InvalidSignature,
    )  # where it is not installed, the line above has said so

    expect(
        place.is_file(),
        f"{path} is not signed: expected {place}, as `rfdlc sign` writes it",
    )
    table = read_json(place)
    known = table.get("format"), table.get("version"), table.get("algorithm")
    readable = known == (FORMAT, VERSION, ALGORITHM) and isinstance(
        table.get("files"), dict
    )
    expect(readable, f"{place}: is not a signature that this version reads")
    try:
        public.verify(
            base64.b64decode(str(table.get("signature")), validate=True),
            _message(table),
        )
    except (InvalidSignature, ValueError):
        raise InputError(
            f"{place}: was not made with this key, or was changed: do not use {path}"
        ) from None
    signed, found = table["files"], _digests(path)
    odd = sorted(
        name
        for name in signed.keys() | found.keys()
        if signed.get(name) != found.get(name)
    )
    expect(
        not odd,
        f"{path}: changed, added or removed since it was signed: {listing(odd, 5)}; do"
        " not use it",
    )
    return len(found)


def signature_of(path: str | Path) -> Path:
    """Where the signature of a file or a folder lies."""
    place = Path(path)
    return place / INSIDE if place.is_dir() else place.with_name(f"{place.name}.sig")


def _digests(path: str | Path) -> dict[str, str]:
    place = Path(path)
    expect(place.exists(), f"{path}: there is no such file or folder")
    files = (
        [place]
        if place.is_file()
        else sorted(file for file in place.rglob("*") if not file.is_dir())
    )
    odd = [
        file
        for file in (*files, *place.rglob("*"))
        if file.is_symlink() or not (file.is_file() or file.is_dir())
    ]
    expect(
        not odd,
        f"{path}: holds links or devices ({listing(odd, 3)}), which can change later:"
        " copy the files",
    )
    own = {
        (file.name if place.is_file() else file.relative_to(place).as_posix()): file
        for file in files
    }
    digests = {
        name: sha256_of(file)
        for name, file in own.items()
        if place.is_file() or name not in (INSIDE, LOCK)
    }
    expect(digests, f"{path}: is empty, there is nothing to sign")
    return digests


def _message(table: dict[str, Any]) -> bytes:
    named = {name: table[name] for name in ("format", "version", "algorithm", "files")}
    return json.dumps(named, sort_keys=True, separators=(",", ":")).encode()


def _read_key(path: str | Path, *, private: bool) -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import (
            Ed25519PrivateKey,
            Ed25519PublicKey,
        )
    except ImportError:
        raise InputError(
            'signatures need cryptography: pip install "rfdlc[sign]"'
        ) from None
    try:
        content = Path(path).read_bytes()
        load = (
            serialization.load_pem_private_key
            if private
            else serialization.load_pem_public_key
        )
        key = load(content, None) if private else load(content)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}): {KEY}") from None
    except (
        Exception
    ) as error:  # of another algorithm, with a password, or no key at all
        raise InputError(
            f"{path}: is not a key that can be used ({type(error).__name__}): {KEY}"
        ) from None
    expect(
        isinstance(key, Ed25519PrivateKey if private else Ed25519PublicKey),
        f"{path}: {KEY}",
    )
    return key
