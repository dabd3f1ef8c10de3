"""rfdlc: reliable decisions on long-tailed data. Train once, calibrate, decide for any
utility.

Public names load on first use, so that `import rfdlc` is cheap and never loads torch,
pandas or matplotlib.
"""

import ast
import pkgutil
from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that defines it, as the imports of `__init__.pyi` say.
_STUB = ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"")
_HOME = {
    alias.name: str(n.module)
    for n in _STUB.body
    if isinstance(n, ast.ImportFrom)
    for alias in n.names
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(
            f"module 'rfdlc' has no attribute {name!r}; it has"
            f" {', '.join(sorted(_HOME))}"
        )
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch" or "pip install" in str(error):
            raise
        raise ModuleNotFoundError(
            f'rfdlc.{name} needs torch: pip install "rfdlc[train]"', name="torch"
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
