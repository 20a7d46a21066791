"""Where a model's files are: the bundled model, a directory, or a repository of the hub.

Only finds (and downloads) files; what is in them is read elsewhere. The hub needs the extra `hub`.
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from ssmcore.errors import CheckpointError, SettingsError, UnavailableError

BUNDLED = "quickstart"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL_FILES = ["*.json", "tokenizer.model", "*.md"]
_SAFETENSORS = ["model*.safetensors"]
_PICKLED = ["pytorch_model*.bin"]


def resolve(path: str | Path, revision: str | None = None) -> Path:
    """The directory of a model.

    Args:
        path: "quickstart", a directory, or a hub id `owner/name`. A directory of that name goes
            before a hub id; write "./quickstart" for a directory of the bundled model's name.
        revision: branch, tag or commit of a hub repository.

    Raises:
        CheckpointError: no such directory, repository or revision.
        SettingsError: a revision of something that has none.
        UnavailableError: the hub is needed and not installed or not to be reached.
    """
    name = str(path)
    if name == BUNDLED:
        _no_revision(name, revision)
        return Path(str(resources.files("ssmcore.models.quickstart")))
    directory = Path(path).expanduser()
    if name and directory.is_dir():
        _no_revision(name, revision)
        return directory
    if name and directory.exists():
        raise CheckpointError(f"{name} is a file; model.path takes the directory it is in")
    if not isinstance(path, str) or not _HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"no directory {name!r}; model.path takes {BUNDLED!r}, a directory or a hub id"
            " owner/name"
        )
    return _download(name, revision)


def _no_revision(name: str, revision: str | None) -> None:
    if revision is not None:
        raise SettingsError(
            f"model.revision = {revision!r} is for hub ids; model.path = {name!r} has no revisions"
        )


def _download(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise UnavailableError(
            f"there is no directory {name!r}, and taking it from the hub needs the extra hub:"
            " pip install 'ssmcore[hub]'"
        ) from error
    try:
        found = Path(
            snapshot_download(name, revision=revision, allow_patterns=_SMALL_FILES + _SAFETENSORS)
        )
        if not any(found.glob(_SAFETENSORS[0])):
            found = Path(
                snapshot_download(
                    name, revision=revision, allow_patterns=[*_SMALL_FILES, *_PICKLED]
                )
            )
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{name} has no revision {revision!r} on the hub") from error
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated: accept its terms on the hub and log in (hf auth login)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"neither a directory nor a repository of the hub: {name!r} (a private one needs"
            " a login: hf auth login)"
        ) from error
    except Exception as error:  # the hub's HTTP library, and its errors, differ by version
        said = str(error).strip().split("\n", 1)[0]
        raise UnavailableError(
            f"there is no directory {name!r}, and the hub cannot be reached"
            f" ({type(error).__name__}: {said}); give model.path a directory or use {BUNDLED!r}"
        ) from error
    return found
