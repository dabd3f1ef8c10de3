"""Signatures of exported files and run folders, made and checked with keys of openssl's
form.
"""

import os
import sys

import pytest

import rfdlc
from rfdlc.cli import main

pytest.importorskip("cryptography", reason='signatures need pip install "rfdlc[sign]"')


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two pairs of keys: (private, public) files."""
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    folder, pairs = tmp_path_factory.mktemp("keys"), []
    for name in "ab":
        key = Ed25519PrivateKey.generate()
        pem = forms.Encoding.PEM
        private = key.private_bytes(
            pem, forms.PrivateFormat.PKCS8, forms.NoEncryption()
        )
        public = key.public_key().public_bytes(
            pem, forms.PublicFormat.SubjectPublicKeyInfo
        )
        pairs.append((folder / f"{name}.pem", folder / f"{name}-public.pem"))
        for path, content in zip(pairs[-1], (private, public), strict=True):
            path.write_bytes(content)
    return pairs


def test_a_file(tmp_path, keys):
    (private, public), (_, other) = keys
    file = tmp_path / "model.onnx"
    file.write_bytes(b"graph")
    assert rfdlc.sign(file, private) == tmp_path / "model.onnx.sig"
    assert rfdlc.verify(file, public) == 1
    with pytest.raises(rfdlc.InputError, match="was not made with this key"):
        rfdlc.verify(file, other)
    file.write_bytes(b"Graph")
    with pytest.raises(
        rfdlc.InputError, match=r"changed, added or removed .*model.onnx; do not use it"
    ):
        rfdlc.verify(file, public)


def test_every_change_of_a_folder_is_found(tmp_path, keys):
    private, public = keys[0]
    (tmp_path / "run" / "more").mkdir(parents=True)
    names = ("config.json", "model.safetensors", "more/history.csv")
    for name in names:
        (tmp_path / "run" / name).write_text(name)
    rfdlc.sign(tmp_path / "run", private)
    (tmp_path / "run" / ".lock").write_text("of a process that is reading")
    assert rfdlc.verify(tmp_path / "run", public) == 3
    for name in names:
        file = tmp_path / "run" / name
        content = file.read_bytes()
        for changed in (content[:-1], bytes([content[0] ^ 1]) + content[1:], None):
            file.unlink() if changed is None else file.write_bytes(changed)
            with pytest.raises(rfdlc.InputError, match=name):
                rfdlc.verify(tmp_path / "run", public)
        file.write_bytes(content)
    (tmp_path / "run" / "decider.json").write_text("{}")
    with pytest.raises(rfdlc.InputError, match=r"decider.json"):
        rfdlc.verify(tmp_path / "run", public)
    (tmp_path / "run" / "decider.json").unlink()
    assert rfdlc.verify(tmp_path / "run", public) == 3
    signature = tmp_path / "run" / "signature.json"
    signature.write_text(signature.read_text().replace("config.json", "config.jso_"))
    with pytest.raises(
        rfdlc.InputError, match="was not made with this key, or was changed"
    ):
        rfdlc.verify(tmp_path / "run", public)
    (tmp_path / "run" / "link").symlink_to("config.json")
    with pytest.raises(rfdlc.InputError, match="links or devices"):
        rfdlc.sign(tmp_path / "run", private)


def test_what_is_no_key_or_no_signature(tmp_path, keys):
    (private, public), _ = keys
    file = tmp_path / "model.onnx"
    file.write_bytes(b"graph")
    with pytest.raises(rfdlc.InputError, match="is not signed: expected"):
        rfdlc.verify(file, public)
    for key in (public, file, tmp_path / "none"):
        with pytest.raises(rfdlc.InputError, match="expected an Ed25519 key"):
            rfdlc.sign(file, key)
    with pytest.raises(rfdlc.InputError, match="expected an Ed25519 key"):
        rfdlc.verify(file, private)
    for text in (
        "{}",
        "[1]",
        "{" * 10_000,
        '{"format": "rfdlc-signature", "version": 1, "algorithm": "none"}',
    ):
        (tmp_path / "model.onnx.sig").write_text(text)
        with pytest.raises(rfdlc.InputError):
            rfdlc.verify(file, public)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(rfdlc.InputError, match="links or devices"):
        rfdlc.sign(tmp_path, private)


def test_commands_and_a_server_that_serves_only_what_is_signed(
    tmp_path, keys, capsys, monkeypatch
):
    (private, public), _ = keys
    file = tmp_path / "model.onnx"
    file.write_bytes(b"graph")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["rfdlc", *map(str, words)])
        try:
            main()
        except SystemExit as end:
            return end.code or 0, *capsys.readouterr()
        return 0, *capsys.readouterr()

    code, _, error = run("serve", file, "--public-key", public)
    assert (code, "is not signed" in error) == (2, True)
    assert run("sign", file, "--key", private)[0] == 0
    assert "the signature of 1 file is valid" in run(
        "verify", file, "--public-key", public
    )[1].replace("\n", " ")
    code, _, error = run("serve", file, "--public-key", public)
    assert (code, "has no checksum" in error) == (
        2,
        True,
    )  # the signature is right, the graph is not


def test_without_the_package_one_line_says_how_to_get_it(
    tmp_path, keys, capsys, monkeypatch
):
    for name in [
        name for name in sys.modules if name.partition(".")[0] == "cryptography"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for command, option, key in (
        ("verify", "--public-key", keys[0][1]),
        ("sign", "--key", keys[0][0]),
    ):
        monkeypatch.setattr(
            sys, "argv", ["rfdlc", command, str(tmp_path), option, str(key)]
        )
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert (
            capsys.readouterr().err
            == 'rfdlc: signatures need cryptography: pip install "rfdlc[sign]"\n'
        )
