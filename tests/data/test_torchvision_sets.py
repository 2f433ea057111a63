"""The benchmark sets: reading, downloads from a local server, and what is said about files that are not as they should be."""

import contextlib
import errno
import gzip
import hashlib
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import numpy as np
import pytest
import scipy.io
import torch
import torchvision.datasets as tv
from local_server import LocalServer

from runner.base.errors import DiskFull, UserError
from runner.data.sources import torchvision_sets as sets

IMAGES = torch.arange(12 * 5 * 4).remainder(256).to(torch.uint8).reshape(12, 5, 4)
LABELS = torch.arange(12).remainder(10).to(torch.uint8)


def _idx(tensor: torch.Tensor) -> bytes:
    return struct.pack(f">4B{tensor.dim()}I", 0, 0, 8, tensor.dim(), *tensor.shape) + tensor.numpy().tobytes()


def _write_family(root: Path, name: str = "MNIST", packed: bool = False) -> Path:
    folder = root / name / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", 12), ("t10k", 10)):
        for kind, tensor in (("images-idx3", IMAGES[:count]), ("labels-idx1", LABELS[:count])):
            content = _idx(tensor)
            path = folder / f"{prefix}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    def no_network(*args, **kwargs):
        raise URLError("network is unreachable")

    monkeypatch.setattr(urllib.request, "urlopen", no_network)


FAMILY = {"MNIST": sets.mnist, "FashionMNIST": sets.fashion_mnist, "KMNIST": sets.kmnist}


@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("download", [False, True])
def test_idx_files_that_are_there_are_read_as_torchvision_does_without_the_network_or_a_write(
    tmp_path, name, packed, download
):
    folder = _write_family(tmp_path, name, packed)
    before = sorted(folder.iterdir())
    found = FAMILY[name](str(tmp_path), download)
    assert torch.equal(found["train"].images, IMAGES.unsqueeze(1))
    assert torch.equal(found["train"].targets, LABELS.long())
    assert sorted(folder.iterdir()) == before
    if not packed:
        theirs = getattr(tv, name)(tmp_path, train=False)
        assert found["train"].classes == tuple(theirs.classes)
        assert torch.equal(found["test"].images.squeeze(1), theirs.data)
        assert torch.equal(found["test"].targets, theirs.targets)


def test_models_that_are_not_built_digits_and_idx_files_import_no_slow_library(tmp_path):
    _write_family(tmp_path)
    code = (
        "import sys, runner.models.torchvision_zoo, runner.models.vit, runner.models.mlp, runner.models.small_cnn;"
        "import runner.models.resnet_cifar;"
        "from runner.data.sources.digits import digits; digits();"
        f"from runner.data.sources.torchvision_sets import mnist; mnist({str(tmp_path)!r}, False);"
        "assert not {'sklearn', 'scipy', 'torchvision'} & set(sys.modules), 'a slow import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_root_that_is_a_file_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data.root: cannot write .*/file/MNIST"):
        sets.mnist(str(tmp_path / "file"), True)


def _md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server of the files of a folder, from which torchvision downloads MNIST, with the digests of its files.

    After a pause in seconds, it sends what `faults` has for the name of a file, or the file.
    """
    folder, listener = _write_family(tmp_path / "published", packed=True), LocalServer()
    made = SimpleNamespace(folder=folder, pause=0.0, requests=[], faults={})

    def answer(handler):
        name = handler.path.strip("/")
        if "/" in name:
            return handler.send_error(404)
        made.requests.append(name)
        content = (folder / name).read_bytes()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        time.sleep(made.pause)
        with contextlib.suppress(OSError):
            handler.wfile.write(made.faults.get(name, content))
        return None

    monkeypatch.undo()  # of `_offline`
    listener.listen(type("Handler", (BaseHTTPRequestHandler,), {"do_GET": answer}))
    made.url = f"http://127.0.0.1:{listener.port}/"
    monkeypatch.setattr(tv.MNIST, "resources", [(path.name, _md5(path)) for path in sorted(folder.iterdir())])
    monkeypatch.setattr(tv.MNIST, "mirrors", [f"{made.url}gone/", made.url])
    yield made
    listener.stop()


def test_idx_files_are_downloaded_where_they_are_missing_or_damaged(tmp_path, server):
    folder = _write_family(tmp_path, packed=True)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(b"what a killed download left")
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    found = sets.mnist(str(tmp_path), True)
    assert torch.equal(found["train"].images, IMAGES.unsqueeze(1))
    assert set(server.requests) == {"train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"}
    assert [each.read_bytes() for each in sorted(folder.glob("*.gz"))] == [
        each.read_bytes() for each in sorted(server.folder.iterdir())
    ]


@pytest.mark.parametrize("part", [b"", b"damaged", 20])
def test_what_arrives_damaged_is_not_taken_for_whole(tmp_path, server, part):
    name = "train-images-idx3-ubyte.gz"
    server.faults[name] = (server.folder / name).read_bytes()[:part] if isinstance(part, int) else part
    for _ in range(2):
        with pytest.raises(UserError, match=r"data.download: downloading MNIST failed"):
            sets.mnist(str(tmp_path), True)
    server.faults.clear()
    assert torch.equal(sets.mnist(str(tmp_path), True)["train"].images, IMAGES.unsqueeze(1))


def test_a_server_that_sends_nothing_is_given_up(tmp_path, server, monkeypatch):
    monkeypatch.setattr(sets, "_SILENCE_S", 0.1)
    server.pause = 0.5
    with pytest.raises(UserError, match=r"data.download: downloading MNIST failed: .*timed out"):
        sets.mnist(str(tmp_path), True)


def test_a_signal_of_the_run_ends_a_download(tmp_path, server, handled):
    server.pause = 30.0
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(sets.DownloadStopped, match="a signal stopped the download of MNIST"):
        sets.mnist(str(tmp_path), True)
    assert handled == [signal.SIGTERM], "the run's own handler is called, too"


def test_a_full_disk_is_said(tmp_path, server, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", full)
    with pytest.raises(DiskFull, match=r"data.root: cannot write .*MNIST/raw: No space left"):
        sets.mnist(str(tmp_path), True)


def test_readers_that_download_at_once_ask_for_each_file_once(tmp_path, server):
    server.pause = 0.1
    with ThreadPoolExecutor(3) as pool:  # each has its own descriptor of the lock, as processes have
        found = list(pool.map(lambda _: sets.mnist(str(tmp_path), True), range(3)))
    assert [len(each["train"].targets) for each in found] == [12] * 3
    assert len(server.requests) == 2 * 4, "torchvision asks twice, for redirections first"


CONTENT = _idx(IMAGES)
DAMAGED = {
    "no bytes": b"",
    "half of the magic": CONTENT[:2],
    "half of the header": CONTENT[:9],
    "cut pixels": CONTENT[:-1],
    "too many bytes": CONTENT + b"\0",
    "labels for images": _idx(LABELS),
    "floats": b"\0\0\x0d\3" + CONTENT[4:],
    "no images": struct.pack(">4B3I", 0, 0, 8, 3, 0, 5, 4),
    "a page of html": b"<html>404</html>",
}
WHOLE = gzip.compress(CONTENT)
PACKED = {name: gzip.compress(content) for name, content in DAMAGED.items()}
PACKED |= {
    "cut gzip": WHOLE[:-9],
    "wrong checksum": WHOLE[:-6] + bytes([WHOLE[-6] ^ 1]) + WHOLE[-5:],
    "gzip of nothing": WHOLE[:3],
}


@pytest.mark.parametrize(
    ("ending", "content"),
    [*(("", content) for content in DAMAGED.values()), *((".gz", content) for content in PACKED.values())],
    ids=[*DAMAGED, *(f"packed {name}" for name in PACKED)],
)
def test_a_malformed_idx_file_is_named(tmp_path, ending, content):
    path = _write_family(tmp_path, packed=bool(ending)) / f"train-images-idx3-ubyte{ending}"
    path.write_bytes(content)
    for download in (False,) if ending else (False, True):  # an unpacked file is not fetched again
        with pytest.raises(UserError, match=f"cannot read {re.escape(str(path))}: "):
            sets.mnist(str(tmp_path), download)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (LABELS[:7], r"t10k-labels-idx1-ubyte: targets must be .*, one for each image, got .*\(7,\)"),
        (LABELS[:10] + 1, "t10k-labels-idx1-ubyte: targets must index the 10 classes, got values from 1 to 10"),
    ],
)
def test_labels_that_do_not_fit_their_images_or_classes_are_named(tmp_path, labels, message):
    (_write_family(tmp_path) / "t10k-labels-idx1-ubyte").write_bytes(_idx(labels))
    with pytest.raises(UserError, match=message):
        sets.mnist(str(tmp_path), False)


def test_no_more_is_unpacked_than_a_data_set_can_have(tmp_path):
    (tmp_path / "file").write_bytes(WHOLE)
    with pytest.raises(UserError, match="where its header promises"):
        sets.read_idx(tmp_path / "file", 3, IMAGES.numel() - 2)


def _write_cifar(root: Path, monkeypatch, name: str = "CIFAR10") -> Path:
    source = getattr(tv, name)
    folder = root / source.base_folder
    folder.mkdir()
    key, count = ("fine_labels", 100) if name == "CIFAR100" else ("labels", 10)
    classes, rng = [f"class {index}" for index in range(count)], np.random.default_rng(0)

    def write(filename: str, content: dict) -> list[str]:
        (folder / filename).write_bytes(pickle.dumps(content, protocol=2))
        return [filename, _md5(folder / filename)]

    for files in ("train_list", "test_list"):
        contents = (
            {"data": rng.integers(0, 256, (4, 3072), dtype=np.uint8), key: [3, 1, count - 1, 0]} for _ in range(9)
        )
        written = [write(filename, next(contents)) for filename, _ in getattr(source, files)]
        monkeypatch.setattr(source, files, written)
    filename, md5 = write(source.meta["filename"], {source.meta["key"]: classes})
    monkeypatch.setattr(source, "meta", source.meta | {"filename": filename, "md5": md5})
    return folder


def _write_svhn(root: Path, monkeypatch) -> Path:
    rng = np.random.default_rng(0)
    listed = dict(tv.SVHN.split_list)
    for split, labels in (("train", [10, 1, 2]), ("test", [9, 10])):
        url, filename, _ = listed[split]
        pixels = rng.integers(0, 256, (32, 32, 3, len(labels)), dtype=np.uint8)
        scipy.io.savemat(root / filename, {"X": pixels, "y": np.array(labels, dtype=np.uint8)[:, None]})
        listed[split] = [url, filename, _md5(root / filename)]
    monkeypatch.setattr(tv.SVHN, "split_list", listed)
    return root


CIFAR = {"CIFAR10": (sets.cifar10, 20, 10), "CIFAR100": (sets.cifar100, 4, 100)}


@pytest.mark.parametrize("name", CIFAR)
@pytest.mark.parametrize("download", [False, True])
def test_cifar_is_read_as_channels_first(tmp_path, monkeypatch, name, download):
    build, count, classes = CIFAR[name]
    folder = _write_cifar(tmp_path, monkeypatch, name)
    found = build(str(tmp_path), download)
    assert found["train"].images.shape == (count, 3, 32, 32)
    assert found["test"].targets.tolist() == [3, 1, classes - 1, 0]
    assert found["train"].classes == tuple(f"class {index}" for index in range(classes))
    stored = pickle.loads((folder / getattr(tv, name).test_list[0][0]).read_bytes())["data"]
    assert torch.equal(found["test"].images, torch.from_numpy(stored).reshape(4, 3, 32, 32))


def test_svhn_is_read_with_zero_as_class_zero(tmp_path, monkeypatch):
    found = sets.svhn(str(_write_svhn(tmp_path, monkeypatch)), False)
    assert found["train"].targets.tolist() == [0, 1, 2]
    assert found["test"].targets.tolist() == [9, 0]
    stored = scipy.io.loadmat(tmp_path / "test_32x32.mat")["X"]
    assert torch.equal(found["test"].images[1, 2], torch.from_numpy(stored[:, :, 2, 1]))


MISSING = {
    "MNIST": (lambda root, _: _write_family(root), sets.mnist, "t10k-labels-idx1-ubyte", "unpacked or as .gz"),
    "SVHN": (_write_svhn, sets.svhn, "test_32x32.mat", tv.SVHN.split_list["test"][0]),
    "CIFAR10": (_write_cifar, sets.cifar10, "data_batch_1", tv.CIFAR10.url),
    "CIFAR100": (lambda root, patch: _write_cifar(root, patch, "CIFAR100"), sets.cifar100, "train", tv.CIFAR100.url),
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_files_are_named_with_the_folder_and_the_remedy_also_if_a_download_fails(tmp_path, monkeypatch, name):
    write, build, first, source = MISSING[name]
    folder = write(tmp_path, monkeypatch)
    (folder / first).unlink()
    for download, reason in (
        (False, r"(.|\n)*data\.download=true"),
        (True, r"data\.download: downloading \w+ failed: .*network is unreachable.*\n.*by hand"),
    ):
        with pytest.raises(UserError, match=reason) as caught:
            build(str(tmp_path), download)
        for part in (str(folder), f": {first} not found there", source):
            assert part in str(caught.value)
        assert "\n" not in caught.value.problems[0].message


def test_all_files_of_a_set_are_named_if_there_is_no_folder(tmp_path):
    with pytest.raises(UserError, match="raw: train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3"):
        sets.fashion_mnist(str(tmp_path / "none"), False)


def test_a_damaged_file_is_named_and_never_unpickled(tmp_path, monkeypatch):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (_write_cifar(tmp_path, monkeypatch) / "data_batch_3").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match="data_batch_3 has another MD5 than the published one"):
        sets.cifar10(str(tmp_path), False)
    assert not (tmp_path / "ran").exists()
    (_write_svhn(tmp_path, monkeypatch) / "test_32x32.mat").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"test_32x32\.mat has another MD5"):
        sets.svhn(str(tmp_path), False)


def test_an_archive_of_cifar_is_downloaded_and_unpacked(tmp_path, server, monkeypatch):
    published, root = server.folder, tmp_path / "root"
    folder = _write_cifar(published, monkeypatch)
    with tarfile.open(published / tv.CIFAR10.filename, "w:gz") as archive:
        archive.add(folder, "cifar-10-batches-py")
    monkeypatch.setattr(tv.CIFAR10, "url", f"{server.url}{tv.CIFAR10.filename}")
    monkeypatch.setattr(tv.CIFAR10, "tgz_md5", _md5(published / tv.CIFAR10.filename))
    assert sets.cifar10(str(root), True)["train"].images.shape == (20, 3, 32, 32)
    (published / tv.CIFAR10.filename).unlink()
    for name in ("test_batch", "batches.meta"):
        (root / "cifar-10-batches-py" / name).write_bytes(b"what a killed process had unpacked")
        assert sets.cifar10(str(root), True)["test"].images.shape == (4, 3, 32, 32)  # from the archive that is there


def test_svhn_downloads_both_of_its_files(tmp_path, server, monkeypatch):
    _write_svhn(server.folder, monkeypatch)
    listed = {split: [f"{server.url}{name}", name, md5] for split, (_, name, md5) in tv.SVHN.split_list.items()}
    monkeypatch.setattr(tv.SVHN, "split_list", listed)
    root = tmp_path / "root"
    assert len(sets.svhn(str(root), True)["test"].targets) == 2
    assert {path.name for path in root.glob("[!.]*")} == {"train_32x32.mat", "test_32x32.mat"}


def test_the_real_fashion_mnist_is_read_from_its_gz_files():
    root = Path(os.environ.get("RUNNER_TEST_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
    if not (root / "FashionMNIST" / "raw").is_dir():
        pytest.skip(f"Fashion-MNIST is not in {root}; set RUNNER_TEST_DATA to the folder that holds FashionMNIST/raw")
    found = sets.fashion_mnist(str(root), False)
    assert found["train"].images.shape == (60000, 1, 28, 28)
    assert found["test"].images.shape == (10000, 1, 28, 28)
    assert torch.bincount(found["train"].targets).tolist() == [6000] * 10
    assert found["train"].images.double().mean().item() == pytest.approx(72.94, abs=0.01)
