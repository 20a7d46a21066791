"""Where a model's files come from; the hub itself is never asked."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors

from ssmcore.errors import CheckpointError, SettingsError, UnavailableError
from ssmcore.models.hub import resolve


def hub_gives(monkeypatch, give):
    calls = []

    def download(name, *, revision, allow_patterns):
        calls.append((name, revision, allow_patterns))
        return give()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def raising(error):
    def give():
        raise error

    return give


def test_the_bundled_model_is_a_directory_of_the_package():
    assert (resolve("quickstart") / "byte_tokenizer.json").is_file()


def test_a_directory_is_itself(tmp_path):
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["nowhere", "./a/b", "/a/b", "a/b/c", "a/../b", "../a", ""])
def test_neither_a_directory_nor_a_hub_id_is_refused(path, monkeypatch):
    hub_gives(monkeypatch, raising(AssertionError("the hub was asked")))
    with pytest.raises(CheckpointError, match=r"model\.path"):
        resolve(path)


def test_a_file_is_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match="takes the directory"):
        resolve(file)


def test_a_revision_of_a_directory_is_refused(tmp_path):
    for path in (tmp_path, "quickstart"):
        with pytest.raises(SettingsError, match="revision = 'main'"):
            resolve(path, "main")


def test_a_hub_id_is_downloaded_without_pickled_files_where_it_can(monkeypatch, tmp_path):
    (tmp_path / "model.safetensors").touch()
    calls = hub_gives(monkeypatch, lambda: str(tmp_path))
    assert resolve("owner/name", "v1") == tmp_path
    [(name, revision, patterns)] = calls
    assert (name, revision) == ("owner/name", "v1")
    assert not any("bin" in pattern for pattern in patterns)


def test_a_pickled_hub_model_is_downloaded_in_a_second_go(monkeypatch, tmp_path):
    calls = hub_gives(monkeypatch, lambda: str(tmp_path))
    resolve("owner/name")
    assert any("bin" in pattern for pattern in calls[1][2])


RESPONSE = SimpleNamespace(headers={}, request=None, status_code=404)


@pytest.mark.parametrize(
    ("raised", "expected", "said"),
    [
        (errors.RepositoryNotFoundError("", response=RESPONSE), CheckpointError, "owner/name"),
        (errors.RevisionNotFoundError("", response=RESPONSE), CheckpointError, "'v1'"),
        (errors.GatedRepoError("", response=RESPONSE), CheckpointError, "gated"),
        (errors.LocalEntryNotFoundError(""), UnavailableError, "cannot be reached"),
        (errors.OfflineModeIsEnabled(""), UnavailableError, "cannot be reached"),
        (ConnectionError("no route"), UnavailableError, "cannot be reached"),
    ],
)
def test_what_the_hub_refuses_is_said(raised, expected, said, monkeypatch):
    hub_gives(monkeypatch, raising(raised))
    with pytest.raises(expected, match=said):
        resolve("owner/name", "v1")


def test_without_the_extra_its_name_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UnavailableError, match=r"ssmcore\[hub\]"):
        resolve("owner/name")
