"""Where outside implementations come from: entry points of a group, and files named by path.

  design: name          an entry point of the group `replayssm_harness.designs`
  design: file.py:Name  a class, or a function, of a file; a relative path is relative to the variant file

What is refused is refused in one line that names the variant, before anything runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from harness.errors import ConfigError

if TYPE_CHECKING:
    from harness.protocol import Design

GROUP = "replayssm_harness.designs"
CALLS = ("create", "verify", "commit", "read")
OPTIONAL = {"clone": ["state"], "reset": ["state", "slots", "initial"]}


@dataclass(frozen=True)
class Plugin:
    """An implementation found and not yet made: what makes it, where it lies, who distributes it."""

    key: str  # how messages begin
    name: str
    factory: Callable[[], Any]
    file: Path
    distribution: str | None  # name and version, of an entry point

    def make(self) -> Design:
        """The implementation. Raises ConfigError where it cannot be made, or lacks a call or an argument."""
        # torch comes with it, and a name that is refused must not wait for that
        from harness.protocol import Design

        try:
            made = self.factory()
        except Exception as error:
            raise ConfigError(f"{self.key}: {self.name}() raised {one_line(error)}") from error
        for call in CALLS:
            parameters = list(inspect.signature(getattr(Design, call)).parameters)[1:]
            self._takes(made, call, parameters)
        for call, parameters in OPTIONAL.items():
            if hasattr(made, call):
                self._takes(made, call, parameters)
        return made

    def _takes(self, made: Any, call: str, parameters: list[str]) -> None:
        function = getattr(made, call, None)
        if not callable(function):
            raise ConfigError(f"{self.key}: {self.name} has no call {call}({', '.join(parameters)})")
        try:
            inspect.signature(function).bind(*parameters)
        except TypeError as error:
            asked = f"{call}({', '.join(parameters)})"
            raise ConfigError(f"{self.key}: {self.name} cannot be called as {asked}: {error}") from None
        except ValueError:
            # a compiled function may not tell what it takes
            pass

    def origin(self) -> dict[str, str | None]:
        """What a result depends on: the file of the implementation, every *.py beside it, and its distribution."""
        total = hashlib.sha256()
        for path in sorted({self.file, *self.file.parent.glob("*.py")}):
            content = path.read_bytes()
            total.update(f"{path.name}\0{len(content)}\0".encode() + content)
        return {"design": self.name, "files": total.hexdigest()[:16], "distribution": self.distribution}


def one_line(error: BaseException) -> str:
    """Type and message of an error and, unless it is one of ours, the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def entries() -> dict[str, list[metadata.EntryPoint]]:
    """Installed implementations by name; nothing is imported."""
    found: dict[str, list[metadata.EntryPoint]] = {}
    for entry in metadata.entry_points(group=GROUP):
        there = found.setdefault(entry.name, [])
        # an editable installation may show twice
        if entry.value not in [e.value for e in there]:
            there.append(entry)
    return found


def declaration(name: str) -> Path | None:
    """The variant file that an installed implementation brings; None where no entry point has this name."""
    if name not in entries():
        return None
    plugin = find(f"variants: {name}", name)
    path = getattr(plugin.factory, "variant", None)
    if path is None:
        raise ConfigError(f"variants: {name}: {plugin.name} has no attribute `variant`, the path of its declaration")
    if not Path(path).is_file():
        raise ConfigError(f"variants: {name}: no file {path}, which {plugin.name}.variant names")
    return Path(path)


def find(key: str, design: str) -> Plugin:
    """The implementation that `design:` names, imported. Raises ConfigError beginning with `key`."""
    if file := re.fullmatch(r"(.+\.py):(\w+)", design):
        path = Path(file[1])
        if not path.is_file():
            raise ConfigError(f"{key}: no file {path}")
        return _plugin(key, design, lambda: _with_neighbours(path), file[2], None)
    there = entries().get(design, [])
    if len(there) > 1:
        raise ConfigError(f"{key}: {design!r} is an entry point of {' and of '.join(map(_owner, there))}; name a file")
    if not there:
        have = ", ".join(sorted(entries())) or "none is installed"
        raise ConfigError(f"{key}: {design!r} is neither file.py:Name nor an entry point of {GROUP} ({have})")
    module, _, name = there[0].value.partition(":")
    return _plugin(key, there[0].value, lambda: importlib.import_module(module), name.strip(), _owner(there[0]))


def _owner(entry: metadata.EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.value


def _plugin(key: str, text: str, load: Callable[[], ModuleType], name: str, distribution: str | None) -> Plugin:
    try:
        module = load()
    except Exception as error:
        raise ConfigError(f"{key}: {text} cannot be imported: {one_line(error)}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise ConfigError(f"{key}: {module.__file__} has no class or function {name}")
    return Plugin(key, name, factory, Path(str(module.__file__)), distribution)


def import_file(path: Path) -> ModuleType:
    """The module in a file, run once per place and content."""
    mark = hashlib.sha256(str(path.resolve()).encode() + path.read_bytes()).hexdigest()[:16]
    label = f"harness_file_{path.stem}_{mark}"
    if label in sys.modules:
        return sys.modules[label]
    spec = importlib.util.spec_from_file_location(label, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Triton looks a kernel's module up by its name
    sys.modules[label] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[label]
        raise
    return module


def _with_neighbours(path: Path) -> ModuleType:
    # as for a script: what lies beside the file can be imported from it, later too
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.append(folder)
    return import_file(path)
