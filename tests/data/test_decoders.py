"""`data.decode`: which decoder reads a JPEG, and batches that a device decodes; here the CPU stands in for one."""

from __future__ import annotations

import copy
import io
import json
import resource
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extras import needs
from image_reader import read_image
from PIL import Image
from small_loaders import CPU, Listed, joined, read, same, small_loader
from tar_files import write_tar

from runner.config.schema.sections import Data
from runner.data.bad_samples import ReplacementSampler
from runner.data.cache import Cache, recipe_of
from runner.data.module import read_datasets
from runner.data.sampler import AllSamples
from runner.data.sources import image_io
from runner.data.sources.folders import ImageFolder
from runner.data.sources.hugging_face import EncodedImages
from runner.data.sources.image_io import Decoding, decoded, encoded_image, middle_square, resized
from runner.data.transforms.crops import RandomResizedCrop

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")


def jpeg(width: int, height: int, seed: int = 0, mode: str = "RGB", turn: int = 1, **options: Any) -> bytes:
    """A smooth picture, as decoders differ most at noise."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)
    exif = Image.Exif()
    exif[0x0112] = turn
    image.save(file := io.BytesIO(), "JPEG", quality=95, **{"exif": exif, **options})
    return file.getvalue()


def unusable(content: bytes) -> bytes:
    """The file with a table that no decoder can use: its header is whole, and so is its end."""
    table = content.index(b"\xff\xc4") + 5
    return content[:table] + b"\xff" * 16 + content[table + 16 :]


# Orientations that Pillow and torchcodec read differently: a number of the wrong type, and one outside of Exif
BYTE = b"Exif\0\0II*\0" + struct.pack("<IHHHIII", 8, 1, 0x0112, 1, 1, 6, 0)
XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
FORMS = [
    *({"turn": turn} for turn in range(1, 9)),
    {"exif": BYTE},
    {"exif": b"", "xmp": XMP},
    {"progressive": True},
    {"keep_rgb": True},
    {"mode": "L"},
    {"mode": "CMYK"},
]


@needs("torchcodec")
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_torchcodec_decodes_whole_jpegs_where_it_is_asked_to_and_pillow_alone_where_that_is(
    form: dict[str, Any], channels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    content, used, decoder = jpeg(80, 60, **form), list[str](), image_io._torchcodec()
    monkeypatch.setattr(
        image_io, "_torchcodec", lambda: lambda file, mode: used.append(mode) or decoder(file, mode=mode)
    )

    def made(decode: Any, size: int | None = 8) -> torch.Tensor:
        return read_image("a.jpg", size, channels, content=content, decode=decode)

    whole, reduced = made("pillow", None), made("pillow")
    assert not used
    assert torch.equal(made("auto"), reduced)
    assert not used, "of images this large, Pillow decodes a part at an eighth of the size"
    assert torch.equal(made("torchcodec"), resized(whole, middle_square(*whole.shape[1:]), 8))
    assert torch.equal(made("torchcodec", None), whole)
    turned = form.get("turn", 1) > 1 or "exif" in form
    assert used == ([] if turned else [{1: "GRAY", 3: "RGB"}[channels]] * 2)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("size", [None, 24, 8])
def test_what_a_device_decodes_looks_like_what_the_host_does(form: dict[str, Any], size: int | None) -> None:
    content = jpeg(80, 60, **form)

    def corner(height: int, width: int) -> tuple[int, int, int, int]:
        return 3, 5, height - 11, width - 17

    found = encoded_image("a.jpg", content, Decoding(), size, corner)
    if {"keep_rgb", "mode"} & form.keys():
        assert found is None, "nvJPEG takes all colours for YCbCr"
        return
    assert found is not None
    (image,) = decoded([found], CPU)
    # A part of the whole image: `Decoding.read` decodes large ones at a fraction of their size
    whole = read_image("a.jpg", None, content=content, decode="pillow").float()
    expected = whole if size is None else resized(whole, corner(*whole.shape[1:]), size)
    assert image is not None
    assert image.dtype == torch.uint8
    assert image.shape == expected.shape == found.shape
    assert (image - expected).abs().max() <= 1


def test_a_device_resizes_the_part_alone_leaves_what_it_cannot_to_the_host_and_stops_without_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = list[tuple[int, ...]]()

    def picky(part: torch.Tensor, *arguments: Any) -> torch.Tensor:
        parts.append(tuple(part.shape))
        if part.shape[2] == 82:
            raise RuntimeError("Too much shared memory required")
        return resized(part, *arguments)

    monkeypatch.setattr(image_io, "resized", picky)
    found: Any = [
        encoded_image("a.jpg", jpeg(width, 60), Decoding(), 8, lambda _, columns: (4, 8, 16, columns - 8))
        for width in (80, 90)
    ]
    first, second = decoded(found, CPU)
    assert first is not None
    assert second is None
    assert {*parts} == {(3, 16, 72), (3, 16, 82)}

    def full(*_: Any, **__: Any) -> Any:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr("torchvision.io.decode_jpeg", full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        decoded(found, CPU)


@pytest.fixture
def photos(workdir: Path) -> Path:
    """A folder of photographs that are much larger than 8 pixels, of two classes; two are PNG files."""
    for number in range(24):
        path = workdir / "photos" / "ab"[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = jpeg(40 + number, 60 - number, number, turn=1 + number % 8)
        if number in (6, 7):
            Image.open(io.BytesIO(content)).save(path.with_suffix(".png"))
        else:
            path.write_bytes(content)
    return workdir / "photos"


WORDS = (
    "data=image_folder", "data.root=photos", "data.image_size=8", "data.batch_size=4", "epochs=2", "model=mlp",
    "model.hidden=[8]", "transform=photos", "data.hflip=0.5", "data.num_workers=0", "checkpoint.min_seconds=0",
    "data.split.test=0",
)  # fmt: skip


def digest(result: Any) -> str:
    return str(result.summary["weights_sha256"])


@needs("torchcodec")
def test_data_sets_of_all_kinds_let_the_decoder_of_the_key_read_their_jpegs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, decoder = list[str](), image_io._torchcodec()
    monkeypatch.setattr(
        image_io, "_torchcodec", lambda: lambda file, mode: used.append(mode) or decoder(file, mode=mode)
    )
    photo = jpeg(12, 10)
    Image.new("L", (12, 10), 1).save(mask := io.BytesIO(), "PNG")
    objects = json.dumps({"size": [12, 10], "boxes": [[1, 1, 5, 5]], "labels": [1]}).encode()
    write_tar(tmp_path / "masks" / "a.tar", [("a.jpg", photo), ("a.mask.png", mask.getvalue())])
    write_tar(tmp_path / "boxes" / "a.tar", [("a.jpg", photo), ("a.json", objects)])
    write_tar(tmp_path / "classes" / "a.tar", [("a.jpg", photo), ("a.cls", b"0")])
    for name, content in {
        "table/a.jpg": photo, "table/labels.csv": b"image,label\na.jpg,x\n", "folder/x/a.jpg": photo,
        "drawn/images/a.jpg": photo, "drawn/masks/a.png": mask.getvalue(),
        "masks/classes.txt": b"none\nall\n", "boxes/classes.txt": b"thing\n",
        "yolo/images/train/a.jpg": photo, "yolo/labels/train/a.txt": b"0 0.5 0.5 0.5 0.5\n",
        "yolo/images/val/a.jpg": photo, "yolo/labels/val/a.txt": b"0 0.5 0.5 0.5 0.5\n",
        "yolo/data.yaml": b"train: images/train\nval: images/val\nnames: [thing]\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    shards = "shards.shards"
    for name, target, more in (
        ("folder", "folders.image_folder", {}),
        ("table", "tables.image_table", {"table": "labels.csv"}),
        ("drawn", "masks.segmentation_folder", {"classes": ["none", "all"]}),
        ("yolo", "detection.yolo", {}),
        ("classes", shards, {}),
        ("masks", shards, {"target": "mask"}),
        ("boxes", shards, {"target": "boxes"}),
    ):
        node = {"_target_": f"runner.data.sources.{target}", "root": str(tmp_path / name), **more}
        for decode, expected in {"pillow": 0, "auto": 1, "torchcodec": 1}.items():
            made: Any = read_datasets(Data(dataset=node, decode=decode))
            used.clear()
            _ = made["train"][0]
            assert len(used) == expected, (name, decode)


@needs("torchcodec")
def test_decoders_of_equal_pixels_share_caches() -> None:
    states = [Decoding(8, decode=decode).state() for decode in ("auto", "pillow", "device", "torchcodec")]
    assert states[0] == states[1] == states[2] != states[3]


@needs("torchcodec")
def test_a_cache_of_another_decoder_is_neither_opened_nor_replaced(tmp_path: Path) -> None:
    Image.new("RGB", (80, 60)).save(plain := io.BytesIO(), "PNG")
    # Images without a fingerprint; of five images, a cache compares all but the fourth when it is opened
    contents = [plain.getvalue()] * 3 + [jpeg(80, 60), plain.getvalue()]
    rows, done = [{"image": {"bytes": content}} for content in contents], list[str]()
    for decode in ("auto", "torchcodec", "pillow", "torchcodec"):
        decoding = Decoding(8, decode=decode)  # type: ignore[arg-type]
        made = EncodedImages(rows, "image", "rows", torch.arange(5), (), decoding=decoding)
        recipe = recipe_of(Data(dataset={}, decode=decode))  # type: ignore[arg-type]
        opened = Cache(tmp_path, "rows", recipe).open(made, "train", 0)
        assert opened.images is not None
        assert torch.equal(opened.images[3][0], made[3][0])
        done.append(opened.done.split()[0])
    assert done == ["made", "made", "opened", "opened"]


@pytest.mark.parametrize("decode", ["auto", "pillow"])
def test_attributes_of_own_data_sets_are_left_alone(decode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(Listed):
        @property
        def images(self) -> Any:
            raise AssertionError("a property that may take minutes")

    own = Own([])
    monkeypatch.setattr("runner.data.module.build", lambda *_, **__: own)
    assert read_datasets(Data(dataset={}, decode=decode)) == {"train": own}


@needs("torchcodec")
def test_a_run_has_the_weights_of_its_decoder_and_may_be_resumed_with_another_which_is_reported(
    photos: Path, train: Any
) -> None:
    words = [word for word in WORDS if word != "transform=photos"]
    first = train(*words)
    assert digest(train(*words, "data.decode=pillow", "data.cache=disk")) == digest(first)
    whole = train(*words, "data.decode=torchcodec")
    assert digest(whole) != digest(first)
    cached = train(*words, "data.decode=torchcodec", "data.cache=disk")
    assert digest(cached) == digest(whole), "the cache has the pixels of the decoder"
    resumed = train(f"ckpt_path={cached.directory}", "data.decode=auto", "epochs=3")
    assert "data.decode torchcodec auto yes" in " ".join(resumed.out.split())
    assert resumed.summary["status"] == "finished"


def test_a_decoder_of_files_is_without_effect_on_images_in_memory(train: Any) -> None:
    said = train("data=digits", "model=mlp", "max_steps=1", "epochs=null", "data.decode=pillow").out
    assert "data.decode=pillow has no effect: the data set decodes its images itself" in " ".join(said.split())


def test_an_absent_torchcodec_is_named_with_its_extra(
    photos: Path, train: Any, rejected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_io, "_torchcodec", lambda: None)
    trained = train(*WORDS)
    predict = ("predict", "input=photos", f"ckpt_path={trained.directory}", "output=rows.csv", "data.on_error=skip")
    for words in (("train", *WORDS, "data.on_error=skip"), predict):
        said = rejected(*words, "data.decode=torchcodec").err
        assert "data.decode: is torchcodec, which is not installed" in said
        assert "pip install 'runner[torchcodec]'" in said


def test_no_device_without_cuda(photos: Path, rejected: Any) -> None:
    said = rejected("train", *WORDS, "device=cpu", "data.decode=device").err
    assert "data.decode: is device, which decodes JPEGs with CUDA, and this run uses cpu" in said
    assert "allowed: auto, pillow or torchcodec" in said


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU passes for a device with a decoder."""
    monkeypatch.setattr("runner.data.placement._DECODES", "cpu")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("data=digits",), "data.decode: is device, which decodes image files"),
        ((*WORDS, "data.cache=disk", "transform=none"), "data.cache: keeps images as the host decodes them"),
        (
            (*WORDS, "transform=none", "transform.sample_train=[{_target_: torch.nn.Identity}]"),
            "transform.sample_train",
        ),
        ((*WORDS, "data.images=['0']", "transform=none"), "data.decode: needs samples that are pairs"),
    ],
)
def test_a_device_decodes_neither_caches_nor_what_the_host_transforms(
    words: tuple[str, ...], said: str, photos: Path, rejected: Any
) -> None:
    assert said in rejected("train", *words, "data.decode=device").err


def test_a_torchvision_that_cannot_decode_on_the_device_is_refused(
    photos: Path, rejected: Any, monkeypatch: pytest.MonkeyPatch, device: None
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not compiled with nvJPEG")

    monkeypatch.setattr("torchvision.io.decode_jpeg", broken)
    assert "torchvision cannot decode a JPEG on cpu" in rejected("train", *WORDS, "data.decode=device").err


@pytest.mark.usefixtures("device")
def test_a_run_that_a_device_decodes_for_is_the_same_through_workers_and_resumed_and_skips_what_others_skip(
    photos: Path, train: Any, rejected: Any
) -> None:
    for name in ("a/04.jpg", "b/11.jpg"):
        (photos / name).write_bytes(unusable((photos / name).read_bytes()))
    (photos / "a/10.jpg").write_bytes((photos / "a/10.jpg").read_bytes()[:-400])
    words = (*WORDS, "data.decode=device")
    assert "cannot read the image photos/" in rejected("train", *words).err
    words = (*words, "data.on_error=skip", "data.max_skipped=0.5")
    first = train(*words)
    assert first.summary["skipped"] == 3
    assert digest(train(*words, "data.num_workers=2")) == digest(first)
    stopped = train(*words, "max_steps=7", f"scheduler.total_steps={first.summary['global_step']}")
    resumed = train(f"ckpt_path={stopped.directory}", "max_steps=null", "data.num_workers=1")
    assert digest(resumed) == digest(first)
    host = train(*words, "data.decode=auto")
    assert host.summary["skipped"] == 3
    assert digest(host) != digest(first)


def loader(folder: ImageFolder, workers: int = 0, deferred: bool = True, **options: Any) -> Any:
    """A loader of random crops, which the CPU decodes in batches."""
    made = small_loader(workers, folder, torch.arange(len(folder)), transforms=[RandomResizedCrop(16)], **options)
    if deferred:
        made.reader.encoded = copy.copy(folder)
        made.reader.encoded.defers = True
    return made


@pytest.fixture
def folder(photos: Path) -> ImageFolder:
    files = sorted(photos.rglob("*.*"))
    return ImageFolder(files, [number % 5 for number in range(len(files))], tuple("abcde"), Decoding(16))


def test_batches_of_a_device_have_the_samples_and_crops_of_the_host_for_any_workers_ranks_and_start(
    folder: ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = read(loader(folder), 1, 0, 3)
    with monkeypatch.context() as patch:  # as a device decodes whole images
        patch.setattr(image_io, "_REDUCTIONS", ())
        host = joined(read(loader(folder, deferred=False), 1, 0, 3))
    whole = joined(batches)
    assert torch.equal(whole.indices, host.indices)
    assert torch.equal(whole.targets, host.targets)
    assert (whole.images - host.images.float()).abs().max() == 1, "the same parts, which are rounded otherwise"
    assert same(read(loader(folder, 2), 1, 0, 3), batches)
    assert same(read(loader(folder, 1), 1, 2, 3), batches[2:])
    parts = [read(loader(folder, rank=rank, ranks=2), 1, 0, 3) for rank in range(2)]
    assert same([joined(list(pair)) for pair in zip(*parts, strict=True)], batches)


def test_workers_open_no_file_for_each_image_of_a_batch_of_a_device(folder: ImageFolder) -> None:
    photo, png = (next(path for path in folder.paths if path.suffix == kind) for kind in (".jpg", ".png"))
    mixed = loader(
        ImageFolder([png] * 192 + [photo] * 8, [0] * 200, ("a",), Decoding(16)), 2, batch_size=128, timeout_s=20
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/dev/fd").iterdir()]) + 100, hard))
    try:
        assert len(joined(read(mixed, stop=2)).images) == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_image_that_a_device_cannot_decode_is_read_on_the_host_and_replaced_if_that_cannot_either(
    folder: ImageFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.io import decode_jpeg

    broken = folder.path(4)
    strange = folder.path(5).read_bytes()

    def picky(contents: list[torch.Tensor], **options: Any) -> Any:
        if any(bytes(content.numpy()) == strange for content in contents):
            raise RuntimeError("an unknown kind of JPEG")
        return decode_jpeg(contents, **options)

    def of(batches: Any) -> dict[int, torch.Tensor]:
        whole = joined(batches)
        return dict(zip(whole.indices.tolist(), whole.images, strict=True))

    expected, host = of(read(loader(folder), 0, 0, 3)), of(read(loader(folder, deferred=False), 0, 0, 3))
    broken.write_bytes(unusable(broken.read_bytes()))
    monkeypatch.setattr("torchvision.io.decode_jpeg", picky)
    found: list[Any] = []
    options: Any = {"replacements": ReplacementSampler(3, AllSamples(len(folder))), "on_skipped": found.extend}
    images = of(read(loader(folder, **options), 0, 0, 3))
    instead = of(read(loader(folder, deferred=False, **options), 0, 0, 3))
    assert {bad.sample for bad in found} == {4}
    assert str(broken) in found[0].reason
    assert torch.equal(images[4], instead[4])
    assert torch.equal(images[5], host[5])
    assert not torch.equal(host[5], expected[5])
    assert all(torch.equal(images[each], expected[each]) for each in expected.keys() - {4, 5})
