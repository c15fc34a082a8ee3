"""Registries in YAML: a slip is a ValueError of one line that names the file and the entry."""

from collections.abc import Iterable
from pathlib import Path

import yaml


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
    """It refuses what YAML takes in silence: two entries of one name, and `"\\nu"` for a line break and a u."""

    def construct_mapping(self, node, deep=False):
        names = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise yaml.constructor.ConstructorError(None, None, f"two entries {twice[0]!r}", node.start_mark)
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node):
        if node.style == '"' and any(letter < " " for letter in node.value):
            raise yaml.constructor.ConstructorError(None, None, "found an escape of a control letter", node.start_mark)
        return super().construct_scalar(node)


def read(path: Path):
    """What a file holds."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or "no YAML"
        where = f"{path.name}: line {mark.line + 1}" if mark else path.name
        hint = "; quote a text that holds ': ', ', ' or brackets" if mark else ""
        hint = "; between double quotes a backslash escapes: take single ones" if "escape" in str(problem) else hint
        raise ValueError(f"{where}: {' '.join(str(problem).split())}{hint}") from None


def checked(where: str, entry, kinds: dict[str, type], optional: Iterable[str] = ()) -> dict:
    """An entry that has the fields of `kinds`, each of its type, and no other; `where` is its file and name."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected the fields {list(kinds)}, got {entry!r:.60}")
    if missing := kinds.keys() - entry.keys() - {*optional}:
        raise ValueError(f"{where}: expected the fields {sorted(missing)}")
    if unknown := entry.keys() - kinds.keys():
        raise ValueError(f"{where}: unknown fields {sorted(map(str, unknown))}")
    for field, value in entry.items():
        if not isinstance(value, kinds[field]):
            raise ValueError(f"{where}: {field}: expected a {kinds[field].__name__}, got {value!r:.60}")
    return entry
