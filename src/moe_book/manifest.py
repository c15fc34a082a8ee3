"""The files in `results/`, or another folder, and the manifest there that holds the SHA-256 of each."""

import hashlib
import json
import os
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
NAME = "manifest.json"


def read(name: str, folder: Path = RESULTS) -> tuple[bytes, dict]:
    """A file, bit for bit as it was written, and what the manifest says about it.

    Raises:
        ValueError: for a file that is missing, not in the manifest or not the one that was written, or
            for a damaged manifest; it names the file.
    """
    path, entry = folder / name, entries(folder).get(name)
    if entry is None or not path.is_file():
        raise ValueError(f"{path}: expected a file that is there and in {NAME}; it is {'missing' if entry else 'not'}")
    content = path.read_bytes()
    if (found := _sha256(content)) != entry["sha256"]:
        raise ValueError(
            f"{path}: expected the file that was written, of SHA-256 {entry['sha256']} by {NAME}, got one of {found}; "
            "it was edited, cut or exchanged, or a run was stopped while writing it and has to be started again"
        )
    return content, entry


def read_json(name: str, folder: Path = RESULTS):
    """The content of a JSON file, as `read`."""
    return json.loads(read(name, folder)[0])


def write(name: str, content: bytes, folder: Path = RESULTS, **about) -> None:
    """Write a file and its entry: the SHA-256 and what else is to be said about it.

    Each of the two files is replaced as a whole, the manifest last. A kill in between leaves a file
    that `read` refuses.

    Raises:
        ValueError: for a damaged manifest.
    """
    import fcntl  # not on Windows, where files can be read but not written

    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # two writers take turns; closing the folder lets go
        known = entries(folder) | {name: {"sha256": _sha256(content), **about}}
        for path, data in ((folder / name, content), (folder / NAME, _canonical(known))):
            new = path.with_name(f"{path.name}.new")
            with open(new, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def entries(folder: Path = RESULTS) -> dict[str, dict]:
    """What the manifest of a folder says, by the name of the file; nothing if there is none.

    Raises:
        ValueError: for a manifest that is not, byte for byte, as it was written; it names the manifest.
    """
    path = folder / NAME
    if not path.exists():
        return {}
    content = path.read_bytes()
    try:
        found = json.loads(content)["files"]
        whole = _canonical(found) == content and all("sha256" in entry for entry in found.values())
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(f"{path}: expected the manifest that was written, got one that was edited or cut")
    return found


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _canonical(known: dict[str, dict]) -> bytes:
    """The manifest, a line for each file and the SHA-256 of these lines at the end."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    return f'{{"files": {{\n{lines}\n}},\n"sha256": "{_sha256(lines.encode())}"}}\n'.encode()
