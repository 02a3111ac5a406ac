"""Checkpoint folders as a Hugging Face cache keeps them."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tfglm.hosts.snapshot import (
    as_json,
    bytes_to_fetch,
    copy_from,
    corrupt,
    differences,
    digest,
    manifest,
    missing_files,
    outside,
)

CONTENTS = {
    "config.json": b"{}",
    "model-00001.safetensors": b"a" * 200_000,
    "model-00002.safetensors": b"b" * 100,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"x": "model-00001.safetensors", "y": "model-00002.safetensors"}}
    ).encode(),
}


def blob_name(name: str, data: bytes) -> str:
    if name.endswith(".safetensors"):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """models--org--name/snapshots/<revision> with links to blobs, one of which is a link to elsewhere in the cache."""
    repository = tmp_path / "hub/models--org--name"
    folder = repository / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (tmp_path / "xet").mkdir()
    for name, data in CONTENTS.items():
        blob = repository / "blobs" / blob_name(name, data)
        if name == "model-00001.safetensors":
            (tmp_path / "xet/0815").write_bytes(data)
            blob.symlink_to(tmp_path / "xet/0815")
        else:
            blob.write_bytes(data)
        (folder / name).symlink_to(Path("../../blobs") / blob.name)
    return folder


def blob_of(snapshot: Path, name: str) -> Path:
    return (snapshot / name).resolve()


def test_a_manifest_has_sizes_and_first_blocks_through_all_links(snapshot: Path) -> None:
    files = manifest(snapshot)
    assert [file.name for file in files] == sorted(CONTENTS, key=str.encode)
    assert [file.size for file in files] == [len(CONTENTS[file.name]) for file in files]
    assert files[1].head == hashlib.sha256(b"a" * 65536).hexdigest()


def test_the_same_files_have_the_same_digest_wherever_they_are(snapshot: Path, tmp_path: Path) -> None:
    copy_from(snapshot, tmp_path / "copy")
    assert digest(manifest(tmp_path / "copy")) == digest(manifest(snapshot))
    assert not any(path.is_symlink() for path in (tmp_path / "copy").iterdir())


def test_a_copy_takes_what_differs_and_no_more(snapshot: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    assert copy_from(snapshot, target, write=False) == sum(map(len, CONTENTS.values()))
    assert not target.exists()
    copy_from(snapshot, target)
    assert copy_from(snapshot, target) == 0
    (target / "model-00002.safetensors").write_bytes(b"c" * 100)
    assert copy_from(snapshot, target) == 100
    assert (target / "model-00002.safetensors").read_bytes() == b"b" * 100


def test_a_copy_refuses_a_disk_that_is_too_small(
    snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = os.statvfs(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("U", (), {"free": 50, "total": usage.f_blocks})())
    with pytest.raises(OSError, match=r"needs 200\d\d\d bytes more; 50 are free"):
        copy_from(snapshot, tmp_path / "copy")
    assert not list((tmp_path / "copy").iterdir())


def test_differences_say_what_a_worker_sees_otherwise(snapshot: Path, tmp_path: Path) -> None:
    head = as_json(manifest(snapshot))
    assert differences(head, head) == []
    worker: list[dict[str, Any]] = [dict(file) for file in head]
    worker[1]["head"] = "other"
    worker[2]["size"] = 99
    del worker[0]
    assert differences(head, worker) == [
        "config.json is missing",
        "model-00001.safetensors begins with other bytes",
        "model-00002.safetensors has 99 bytes, not 100",
    ]


def test_a_name_whose_content_is_not_given_is_seen(snapshot: Path) -> None:
    head = as_json(manifest(snapshot))
    blob_of(snapshot, "model-00001.safetensors").unlink()
    assert differences(head, as_json(manifest(snapshot))) == ["model-00001.safetensors cannot be read"]


def test_missing_shards_are_named_by_the_index(snapshot: Path, tmp_path: Path) -> None:
    assert missing_files(snapshot) == []
    (snapshot / "model-00002.safetensors").unlink()
    assert missing_files(snapshot) == ["model-00002.safetensors"]
    assert missing_files(tmp_path / "nothing") == ["config.json", "model.safetensors.index.json"]


def test_content_outside_of_the_export_is_found(snapshot: Path, tmp_path: Path) -> None:
    assert outside(snapshot, tmp_path) == []
    found = outside(snapshot, tmp_path / "hub")
    assert len(found) == 1
    assert "model-00001.safetensors is " in found[0]


def test_bytes_to_fetch_are_those_whose_blobs_are_not_whole(snapshot: Path) -> None:
    siblings = [
        {"rfilename": name, "size": len(data), "blobId": blob_name("x", data)}
        | ({"lfs": {"sha256": blob_name(name, data)}} if name.endswith(".safetensors") else {})
        for name, data in CONTENTS.items()
    ]
    repository = snapshot.parent.parent
    assert bytes_to_fetch(repository, siblings) == 0
    blob_of(snapshot, "model-00002.safetensors").write_bytes(b"b" * 50)
    assert bytes_to_fetch(repository, siblings) == 100
    assert bytes_to_fetch(repository / "none", siblings) == sum(map(len, CONTENTS.values()))


def test_a_damaged_blob_is_found_and_a_good_one_read_once(snapshot: Path, tmp_path: Path) -> None:
    memory = tmp_path / "state/hashes.json"
    everything = sum(map(len, CONTENTS.values()))
    assert corrupt(snapshot, memory) == ([], everything)
    assert corrupt(snapshot, memory) == ([], 0)
    assert corrupt(snapshot) == ([], everything)
    blob_of(snapshot, "model-00002.safetensors").write_bytes(b"c" * 100)
    wrong, read = corrupt(snapshot, memory)
    assert read == 100
    assert wrong == [
        f"model-00002.safetensors: its content does not have the hash {hashlib.sha256(b'b' * 100).hexdigest()}"
    ]
    assert corrupt(snapshot, memory)[0] == wrong, "what was found wrong is not remembered as right"


def test_plain_files_have_no_hash_to_be_compared_with(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert corrupt(tmp_path) == ([], 0)
