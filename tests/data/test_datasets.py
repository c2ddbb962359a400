"""What every data set promises, and what each one reads right."""

import gzip
import lzma
import pickle
import tarfile

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from paceline import data
from paceline.data import adult, cifar10, decoding, files, higgs, libsvm, mnist, shapes
from paceline.errors import MissingError, SpecError

MADE_HERE = ["synthetic", "shapes", "text"]
REAL = {
    "cifar10": (7000, 1000, (3, 32, 32), 10),
    "mnist": (60_000, 10_000, (1, 28, 28), 10),
    "adult": (32_561, 16_281, (123,), 2),
    "acoustic": (240, 60, (50,), 3),
    "higgs": (46_110, 5123, (28,), 2),
    "imagefolder": (160, 40, (3, 224, 224), 10),
}


def check_contract(dataset: data.Dataset) -> None:
    """The promises of `Dataset`, on a few samples."""
    chosen = np.array([3, 0, len(dataset) - 1, 3])
    inputs, targets = dataset.batch(chosen)
    assert inputs.shape == (4, *dataset.input_shape)
    assert targets.dtype == torch.int64
    assert targets.min() >= 0
    assert targets.max() < dataset.num_classes
    assert torch.equal(inputs[0], inputs[3])
    again, _ = dataset.batch(chosen)
    assert torch.equal(inputs, again)
    one_input, one_target = dataset[0]
    assert torch.equal(one_input, inputs[1])
    assert torch.equal(one_target, targets[1])
    from_torch, labels = next(iter(DataLoader(dataset, batch_size=2)))
    by_number, wanted = dataset.batch(np.arange(2))
    assert torch.equal(from_torch, by_number)
    assert torch.equal(labels, wanted)
    if len(dataset.input_shape) == 3:
        assert inputs.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", MADE_HERE)
def test_sets_made_here_keep_the_contract(name, train):
    check_contract(data.open(name, train=train))


@pytest.mark.parametrize("name", REAL)
def test_real_sets_keep_the_contract(name, shared_data):
    num_train, num_test, shape, num_classes = REAL[name]
    for train, count in ((True, num_train), (False, num_test)):
        dataset = data.open(name, data_dir=shared_data, train=train)
        try:
            assert (len(dataset), dataset.input_shape) == (count, shape)
            assert dataset.num_classes == num_classes
            check_contract(dataset)
        finally:
            dataset.close()


def test_every_set_is_covered_above():
    assert {*MADE_HERE, *REAL} == set(data.names())


@pytest.mark.parametrize("name", ["cifar10", "mnist", "higgs", "acoustic"])
def test_training_part_is_normalised(name, shared_data):
    dataset = data.open(name, data_dir=shared_data)
    inputs, _ = dataset.batch(np.arange(0, len(dataset), max(1, len(dataset) // 2000)))
    assert abs(inputs.mean()) < 0.1
    assert abs(inputs.std() - 1) < 0.15


def test_unknown_name_gets_a_suggestion():
    with pytest.raises(SpecError, match='did you mean "cifar10"'):
        data.open("cifar-10")


def test_wrong_shape_for_a_fixed_set_is_refused():
    with pytest.raises(SpecError, match="its samples have"):
        data.open("shapes", input_shape=(3, 64, 64))


@pytest.mark.parametrize(
    "name", [name for name in data.names() if name not in {"synthetic", "shapes"}]
)
def test_empty_folder_names_what_is_missing(name, tmp_path):
    with pytest.raises(MissingError, match=str(tmp_path)):
        data.open(name, data_dir=tmp_path)


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(MissingError, match="nowhere"):
        data.open("mnist", data_dir=tmp_path / "nowhere")


# -- CIFAR-10 ----------------------------------------------------------------------------------


def some_pictures(count: int = 4) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(256, size=(count, 3072), dtype=np.uint8), rng.integers(10, size=count)


def write_cifar10(folder, form: str) -> None:
    planes, labels = some_pictures()
    for name in (*cifar10.TRAIN, *cifar10.TEST):
        if form == "binary":
            records = np.column_stack([labels.astype(np.uint8), planes])
            (folder / f"{name}.bin").write_bytes(records.tobytes())
        else:
            fields = {b"data": planes, b"labels": labels.tolist(), b"filenames": [b"x.png"]}
            (folder / name).write_bytes(pickle.dumps(fields, protocol=2))


@pytest.mark.parametrize("form", ["binary", "python"])
@pytest.mark.parametrize("archived", [False, True])
def test_cifar10_reads_both_forms_loose_and_archived(form, archived, tmp_path):
    loose = tmp_path / "loose"
    loose.mkdir()
    write_cifar10(loose, form)
    folder = loose
    if archived:
        folder = tmp_path / "archive"
        folder.mkdir()
        with tarfile.open(folder / f"cifar-10-{form}.tar.gz", "w:gz") as archive:
            archive.add(loose, "cifar-10-batches")
    planes, labels = some_pictures()
    dataset = data.open("cifar10", data_dir=folder)
    assert len(dataset) == 5 * len(labels)
    inputs, targets = dataset.batch(np.arange(len(labels)))
    shape = (1, 3, 1, 1)
    mean, deviation = np.reshape(cifar10.MEAN, shape), np.reshape(cifar10.DEVIATION, shape)
    expected = (planes.reshape(-1, 3, 32, 32) / 255 - mean) / deviation
    np.testing.assert_allclose(inputs.numpy(), expected, atol=1e-5)
    assert targets.tolist() == labels.tolist()


class Harmful:
    def __reduce__(self):
        return print, ("this must not run",)


def test_cifar10_runs_no_code_from_a_pickle(capsys):
    with pytest.raises(MissingError, match="print"):
        cifar10.parse_python(pickle.dumps({b"data": Harmful()}))
    assert capsys.readouterr().out == ""


# -- MNIST -------------------------------------------------------------------------------------


def test_mnist_digits_have_the_known_mean(shared_data):
    pictures = mnist.parse_idx(files.read(files.find(shared_data, "train-images-idx3-ubyte")))
    assert pictures.mean() / 255 == pytest.approx(mnist.MEAN[0], abs=1e-4)
    assert pictures.std() / 255 == pytest.approx(mnist.DEVIATION[0], abs=1e-4)


def test_mnist_reads_raw_files_and_names_a_broken_one(tmp_path):
    header = bytes([0, 0, 8, 3]) + np.array([2, 28, 28], ">u4").tobytes()
    (tmp_path / "train-images-idx3-ubyte").write_bytes(header + bytes(2 * 28 * 28))
    labels = bytes([0, 0, 8, 1]) + np.array([2], ">u4").tobytes() + bytes([7, 1])
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels)
    assert data.open("mnist", data_dir=tmp_path).batch(np.arange(2))[1].tolist() == [7, 1]
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(labels[:-1])
    with pytest.raises(MissingError, match="1 bytes for an array of"):
        data.open("mnist", data_dir=tmp_path)


# -- Adult and LIBSVM --------------------------------------------------------------------------


@pytest.mark.parametrize(("coded", "raw"), [("a9a", "adult.data"), ("a9a.t", "adult.test")])
def test_raw_census_rows_are_coded_as_a9a(coded, raw, shared_data):
    rows, signs = libsvm.parse(files.read(files.find(shared_data, coded)), adult.NUM_FEATURES)
    our_rows, labels = adult.encode(files.read(files.find(shared_data, raw)).decode())
    assert np.array_equal(our_rows, rows)
    assert np.array_equal(labels == 1, signs > 0)


def test_libsvm_puts_values_where_they_belong():
    rows, labels = libsvm.parse(b"+1 1:0.5 3:-2e-1 \n-1 \n2 2:1\n", 3)
    np.testing.assert_allclose(rows, [[0.5, 0, -0.2], [0, 0, 0], [0, 1, 0]])
    assert labels.tolist() == [1, -1, 2]


# -- HIGGS -------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)]
)
def test_higgs_parses_every_row_once(processes, suffix, compress, tmp_path, monkeypatch):
    monkeypatch.setattr(higgs, "BLOCK_BYTES", 1000)  # many blocks, cut anywhere
    rows = np.random.default_rng(0).normal(size=(50, 29)).astype(np.float32)
    text = "\n".join(",".join(f"{value:.18e}" for value in row) for row in rows)
    source = tmp_path / f"HIGGS.csv{suffix}"
    source.write_bytes(compress(text.encode()))
    path, summary = higgs.parsed(source, processes=processes)
    assert (summary.num_rows, summary.num_train) == (50, 45)
    assert np.array_equal(np.fromfile(path, np.float32).reshape(50, 29), rows)
    np.testing.assert_allclose(summary.mean, rows[:45, 1:].mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(summary.deviation, rows[:45, 1:].std(axis=0), atol=1e-6)


def test_higgs_is_parsed_once_and_a_broken_file_leaves_nothing(tmp_path, cache, monkeypatch):
    source = tmp_path / "HIGGS.csv"
    source.write_text("1,2,3\n")
    with pytest.raises(MissingError, match="not rows of 29 numbers"):
        higgs.parsed(source)
    assert list((cache / "higgs").iterdir()) == []
    source.write_text(",".join(["1.0"] * 29) + "\n" + ",".join(["0.0"] * 29) + "\n")
    first = higgs.parsed(source)
    monkeypatch.setattr(higgs, "_parse_file", lambda *_: pytest.fail("parsed again"))
    assert higgs.parsed(source) == first


# -- pictures, text, synthetic -----------------------------------------------------------------


def test_imagefolder_cuts_differ_by_epoch_and_not_by_who_asks(shared_data):
    first, second = (data.open("imagefolder", data_dir=shared_data, seed=5) for _ in range(2))
    try:
        both = first.batch(np.array([1, 2]), epoch=3)[0]
        assert torch.equal(both[1:], second.batch(np.array([2]), epoch=3)[0])
        assert not torch.equal(both, first.batch(np.array([1, 2]), epoch=4)[0])
    finally:
        first.close()
        second.close()


def test_boxes_lie_inside_the_picture():
    rng = np.random.default_rng(0)
    for width, height in [(500, 375), (33, 900), (224, 224)]:
        for box in [decoding.random_box(width, height, rng) for _ in range(50)]:
            left, upper, right, lower = box
            assert 0 <= left < right <= width + 1e-6
            assert 0 <= upper < lower <= height + 1e-6


def test_shapes_are_the_same_everywhere_and_balanced():
    pictures, labels = shapes.draw(1000, seed=1)
    again, _ = shapes.draw(1000, seed=1)
    assert np.array_equal(pictures, again)
    assert np.bincount(labels).min() > 60


def test_text_targets_are_the_next_bytes(tmp_path):
    content = bytes(range(32, 127)) * 20
    (tmp_path / "a.txt").write_bytes(content)
    dataset = data.open("text", data_dir=tmp_path, input_shape=(16,))
    inputs, targets = dataset.batch(np.arange(3))
    assert bytes(inputs[0].tolist()) == content[:16]
    assert bytes(targets[0].tolist()) == content[1:17]
    assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])


def test_synthetic_batches_of_consecutive_samples_are_not_copied():
    dataset = data.open("synthetic", input_shape=(3, 64, 64), num_classes=1000)
    one, other = (dataset.batch(np.arange(640, 672))[0] for _ in range(2))
    assert one.data_ptr() == other.data_ptr()
    backwards, _ = dataset.batch(np.arange(671, 639, -1))
    assert torch.equal(backwards.flip(0), one)


def test_synthetic_repeats_when_the_pool_ends():
    dataset = data.open("synthetic", input_shape=(3, 224, 224), num_classes=5)
    many, _ = dataset.batch(np.arange(100))
    assert torch.equal(many[97], dataset[97][0])
    assert len(dataset) == 50_000


def test_synthetic_tokens_are_shifted_by_one():
    dataset = data.open("synthetic", input_shape=(8,), num_classes=50, tokens=True)
    inputs, targets = dataset.batch(np.arange(4))
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
