"""User code: import it, look up a name, call it, and report failures."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import socket
import sys
import urllib.error
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

from profiles.capture.frames import shown_path, summary, user_line
from profiles.errors import AdvisorError, ModelError, near_misses

RETURN = "let it return (Module, sample) or (Module, sample, loss_fn); sample is one local batch"
"""The hint that tells what a factory may return."""

_NETWORK = (ConnectionError, TimeoutError, socket.gaierror, urllib.error.URLError)
# Of huggingface_hub and httpx, which need not be installed.
_NETWORK_NAMES = ("LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectError")


def import_module(name: str) -> ModuleType:
    """Import `name`, searching the current folder first, as `python -m` does; or a file, searching
    its own folder first, as `python FILE` does.

    Raises:
        ModelError: there is no such module or file (the near miss is named), it fails while it
            imports, or another module has the file's name.
    """
    _search_current_folder()
    if is_file(name):
        return _import_file(name)
    with guarded(f"`{name}` does not import"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or name
            if missing == name or name.startswith(f"{missing}."):
                raise _no_module(name, missing) from None
            raise ModelError(
                f"`{name}` does not import: no module named `{missing}`",
                where=user_line(error),
                hints=[f"install `{missing}` where `advise` is installed"],
            ) from None


def is_file(name: str) -> bool:
    """True if `name` is a file's, not a module's."""
    return name.endswith(".py")


def _import_file(name: str) -> ModuleType:
    """Import a file as a module: the folder above its packages is searched first."""
    path = _existing(name)
    folder, parts = path.parent, [path.stem]
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    module = import_module(".".join(parts))
    if not path.samefile(module.__file__ or "/"):
        raise ModelError(
            f"`{name}` does not import: another module is called `{module.__name__}`",
            where=shown_path(module.__file__),
            hints=["rename the file"],
        )
    return module


def _existing(name: str) -> Path:
    path = Path(name).resolve()
    if os.path.isfile(path):
        return path
    near = near_misses(path.name, [file.name for file in path.parent.glob("*.py")])
    hints = [f"did you mean `{Path(name).parent / item}`?" for item in near]
    hints = hints or [f"it is looked for from {Path.cwd()}"]
    raise ModelError(f"there is no file `{name}`", hints=hints)


def require_package(name: str) -> None:
    """Check that a file exists, or the package or module that a dotted name begins with; nothing is
    imported.

    Raises:
        ModelError: it does not; the near miss is named.
    """
    if is_file(name):
        _existing(name)
        return
    _search_current_folder()
    root = name.partition(".")[0]
    if root not in sys.modules and importlib.util.find_spec(root) is None:
        raise _no_module(name, root)


def _search_current_folder() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()


def attribute(module: ModuleType, name: str, *, called: str) -> object:
    """Look up a dotted name in a module, which the user `called` by its name or file.

    Raises:
        ModelError: there is none; the near miss is named.
    """
    value: object = module
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            own = [key for key, item in vars(value).items() if _is_candidate(key, item, module)]
            near = near_misses(part, own)
            hint = (
                "did you mean " + " or ".join(f"`{called}:{item}`" for item in near) + "?"
                if near
                else f"it has: {', '.join(own) or 'no function or class of its own'}"
            )
            raise ModelError(
                f"`{called}` has no `{name}`",
                where=shown_path(getattr(module, "__file__", None)),
                hints=[hint],
            ) from None
    return value


def call(text: str, function: Callable[[], object]) -> object:
    """Call a factory without arguments.

    Raises:
        ModelError: it wants arguments, or raises.
    """
    try:
        inspect.signature(function).bind()
    except ValueError:  # a callable without a signature, such as a builtin
        pass
    except TypeError as error:
        raise ModelError(
            f"`{text}` cannot be called without arguments: {error}",
            hints=["name a function without arguments that returns the model"],
        ) from None
    with guarded(f"`{text}` raises"):
        return function()


@contextlib.contextmanager
def guarded(doing: str) -> Iterator[None]:
    """Run user code: exceptions become a `ModelError`, its stdout goes to stderr.

    stdout belongs to the report and to `--json`.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except AdvisorError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{doing}: {summary(error)}",
            where=user_line(error),
            hints=[*_hint(error), "`--debug` shows the traceback"],
        ) from error


def _hint(error: BaseException) -> Iterator[str]:
    """Suggest the meta device if the code needs the network: shapes suffice."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, _NETWORK) or type(link).__name__ in _NETWORK_NAMES:
            yield (
                "it wants the network; weights are not looked at: build the model from its"
                " configuration, as in `AutoModelForCausalLM.from_config(config)`"
            )
            return
        link = link.__cause__ or link.__context__


def _no_module(name: str, missing: str) -> ModelError:
    parent, _, last = missing.rpartition(".")
    folders = getattr(sys.modules.get(parent), "__path__", None) if parent else [os.getcwd()]
    siblings = [module.name for module in pkgutil.iter_modules(folders)]
    near = [f"{parent}.{item}" if parent else item for item in near_misses(last, siblings)]
    hints = ["did you mean " + " or ".join(f"`{item}`" for item in near) + "?"] if near else []
    return ModelError(
        f"`{name}` does not import: no module named `{missing}`",
        hints=[*hints, "run `advise` in the folder that holds it, or install it"],
    )


def _is_candidate(name: str, value: object, module: ModuleType) -> bool:
    return (
        not name.startswith("_")
        and callable(value)
        and getattr(value, "__module__", None) == module.__name__
    )
