"""Modules of the user's own, which register methods, metrics, calibrators and data
formats: `rfdlc --import`.

A command line names them, and nothing else: what a run folder records about them is
shown, and never imported. Nor is the code of a network, `package.module:function`,
unless the user named it, too.
"""

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb

from rfdlc.errors import InputError, choose, expect
from rfdlc.formats.files import read_json

RECORDED = "imports"  # in config.json of a run folder
IMPORTED: list[str] = []  # by this process, files by their whole path
TRUSTED: set[str] = (
    set()
)  # what names code, package.module:function, in the user's own words to this process
FIRST = "one of your own must be registered first: `rfdlc --import MODULE ...`"


def import_own(names: Iterable[str]) -> None:
    """Import modules by their names, or by the paths of their files (.py), each once;
    trust `module:function`.
    """
    for given in names:
        if ":" in given and not given.endswith(".py"):
            trust(given)
            continue
        name = (
            str(Path(given).expanduser().absolute()) if given.endswith(".py") else given
        )
        if name in IMPORTED:
            continue
        try:
            _import_file(Path(name)) if given.endswith(".py") else import_module(name)
        except InputError as error:
            raise InputError(f"--import {given}: {error}") from None
        except Exception as error:
            place, told = (
                extract_tb(error.__traceback__)[-1],
                f"{type(error).__name__}: {error}",
            )
            absent = isinstance(error, ModuleNotFoundError) and name.startswith(
                str(error.name)
            )
            more = ": expected the path of a .py file, or a module on PYTHONPATH"
            more = more if absent else f"; {place.filename}, line {place.lineno}"
            raise InputError(
                f"--import {given}: cannot be imported ({told}){more}"
            ) from error
        IMPORTED.append(name)


def _import_file(path: Path) -> None:
    """As a module of its own name; its folder is searched after all others."""
    expect(path.is_file(), "no such file")
    known = sys.modules.get(path.stem) or find_spec(path.stem)
    origin = getattr(known, "__file__", None) or getattr(known, "origin", None)
    taken = (
        f"another module is called {path.stem} ({origin or 'built-in'}): rename the"
        " file"
    )
    expect(known is None or (origin and path.samefile(origin)), taken)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    import_module(path.stem)


def trust(name: object) -> None:
    """Let `package.module:function` be imported, as the user's own words name it; those
    of a file are not enough.
    """
    if isinstance(name, str) and ":" in name:
        TRUSTED.add(name)


def known_here() -> list[str]:
    """What another process of this one is to import and to trust."""
    return [*IMPORTED, *sorted(TRUSTED)]


def check_trusted(name: str) -> None:
    """Raise if `package.module:function` is named by a file alone."""
    module = name.partition(":")[0]
    own = [Path(given).stem if given.endswith(".py") else given for given in IMPORTED]
    known = name in TRUSTED or any(
        f"{module}.".startswith(f"{given}.") for given in own
    )
    fix = (
        f"if you trust it: `rfdlc --import {module} ...`, in Python"
        f" rfdlc.imports.trust({name!r})"
    )
    expect(
        known,
        f"backbone {name!r} is code, which is not imported because a file names it;"
        f" {fix}",
    )


def choose_registered(what: str, given: str, registry: Iterable[str]) -> str:
    """A name in a registry that users may extend."""
    try:
        return choose(what, given, registry)
    except InputError as error:
        raise InputError(f"{error}; {FIRST}") from None


def check_imports(folder: Path) -> None:
    """Raise if a run folder was made with modules that are not imported here."""
    told = register_first(folder)
    expect(told == FIRST, f"{folder}: {told}")


def recorded() -> dict[str, list[str]]:
    """What a run folder keeps of the imports."""
    return {RECORDED: [*IMPORTED]} if IMPORTED else {}


def with_imports(error: Exception, folder: Path) -> str:
    """The error of a file in a run folder, with the imports that are missing."""
    return str(error).replace(FIRST, register_first(folder))


def register_first(folder: Path) -> str:
    """How to register what a run folder depends on: by the imports that it was made
    with, if it names any.
    """
    file = folder / "config.json"
    found = read_json(file).get(RECORDED) if file.is_file() else None
    names = (
        [name for name in found if isinstance(name, str)]
        if isinstance(found, list)
        else []
    )
    words = " ".join(f"--import {name}" for name in names if name not in IMPORTED)
    return (
        f"it was made with `rfdlc {words} ...`: give that again, if you trust these"
        " files"
        if words
        else FIRST
    )
