import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from normexp.data import Dataset, Split, describe_dataset, load_dataset
from normexp.errors import UserError


def raw_rows(dataset: Dataset, split: Split) -> np.ndarray:
    """Undo the standardisation: rows of 64 whole numbers and the label."""
    pixels = (split.inputs.double() * dataset.std[0] + dataset.mean[0]) * 16
    rows = pixels.flatten(1).numpy()
    # float32 keeps about 7 digits of numbers up to 16.
    assert np.abs(rows - rows.round()).max() < 1e-5
    return np.column_stack([rows.round().astype(int), split.targets.numpy()])


def test_shapes_sizes_and_types() -> None:
    dataset = load_dataset("digits", {})
    assert dataset.name == "digits"
    assert dataset.input_shape == (1, 8, 8)
    assert dataset.num_classes == 10
    for split, size in ((dataset.train, 1000), (dataset.val, 297), (dataset.test, 500)):
        assert split.inputs.shape == (size, 1, 8, 8)
        assert split.inputs.dtype == torch.float32
        assert split.targets.shape == (size,)
        assert split.targets.dtype == torch.int64
        assert set(split.targets.tolist()) == set(range(10))


def test_splits_together_are_the_stored_digits_each_once() -> None:
    dataset = load_dataset("digits", {"split_seed": 4})
    rows = np.concatenate(
        [raw_rows(dataset, split) for split in (dataset.train, dataset.val, dataset.test)]
    )
    stored = load_digits()
    expected = np.column_stack([stored.data.astype(int), stored.target])
    # No two stored rows are equal, so equal sorted rows also mean that splits are disjoint.
    assert len(np.unique(expected, axis=0)) == 1797
    np.testing.assert_array_equal(np.unique(rows, axis=0), np.unique(expected, axis=0))


def test_statistics_are_those_of_the_training_split() -> None:
    dataset = load_dataset("digits", {})
    train = raw_rows(dataset, dataset.train)[:, :64] / 16
    assert dataset.mean[0] == pytest.approx(train.mean(), abs=1e-12)
    assert dataset.std[0] == pytest.approx(train.std(), abs=1e-12)
    assert float(dataset.train.inputs.double().mean()) == pytest.approx(0, abs=1e-6)
    assert float(dataset.train.inputs.double().std(correction=0)) == pytest.approx(1, abs=1e-6)


def test_test_split_depends_on_its_seed_alone() -> None:
    whole = load_dataset("digits", {})
    fewer = load_dataset("digits", {"num_val": 100, "num_train": 50})
    other = load_dataset("digits", {"split_seed": 1})
    assert torch.equal(fewer.test.targets, whole.test.targets)
    assert not torch.equal(other.test.targets, whole.test.targets)


def test_num_train_keeps_a_prefix_and_the_validation_samples() -> None:
    whole = load_dataset("digits", {})
    fewer = load_dataset("digits", {"num_train": 64})
    assert torch.equal(fewer.train.targets, whole.train.targets[:64])
    assert torch.equal(fewer.val.targets, whole.val.targets)
    np.testing.assert_array_equal(raw_rows(fewer, fewer.train), raw_rows(whole, whole.train)[:64])


@pytest.mark.parametrize("image_size", [4, 16])
def test_image_size_resizes_and_standardises_again(image_size: int) -> None:
    dataset = load_dataset("digits", {"image_size": image_size})
    assert dataset.input_shape == (1, image_size, image_size)
    assert float(dataset.train.inputs.double().mean()) == pytest.approx(0, abs=1e-6)
    assert float(dataset.train.inputs.double().std(correction=0)) == pytest.approx(1, abs=1e-6)


def test_halving_the_size_smooths_before_it_samples() -> None:
    # Antialiased by 2 with a triangle of width 4: a checkerboard comes out nearly flat, where
    # plain sampling would keep its full contrast.
    whole = load_dataset("digits", {})
    half = load_dataset("digits", {"image_size": 4})
    scaled = (whole.test.inputs.double() * whole.std[0] + whole.mean[0])[:, 0]
    shown = (half.test.inputs.double() * half.std[0] + half.mean[0])[:, 0]
    weights = torch.tensor([1.0, 3.0, 3.0, 1.0], dtype=torch.float64) / 8
    # An inner output pixel: rows and columns 1..4 in these weights.
    expected = torch.einsum("nij,i,j->n", scaled[:, 1:5, 1:5], weights, weights)
    assert (shown[:, 1, 1] - expected).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("params", "key", "says"),
    [
        ({"num_val": 0}, "data.params.num_val", "from 1 to 1296"),
        ({"num_val": 1297}, "data.params.num_val", "from 1 to 1296"),
        ({"num_train": 0}, "data.params.num_train", "from 1 to 1000"),
        ({"num_train": 1001}, "data.params.num_train", "from 1 to 1000"),
        ({"num_test": 0}, "data.params.num_test", "from 1 to 1795"),
        ({"num_test": 1796}, "data.params.num_test", "from 1 to 1795"),
        ({"image_size": 0}, "data.params.image_size", "at least 1"),
        ({"num_train": [1, 2]}, "data.params.num_train", "int"),
        ({"num_trian": 2}, "data.params.num_trian", "num_train"),
    ],
)
def test_impossible_sizes_are_told_in_one_line(params: dict[str, Any], key: str, says: str) -> None:
    for act in (load_dataset, describe_dataset):
        with pytest.raises(UserError) as caught:
            act("digits", params)
        assert caught.value.key == key
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def test_fingerprint_does_not_depend_on_the_process() -> None:
    code = "from normexp.data import load_dataset; print(load_dataset('digits', {}).fingerprint)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == load_dataset("digits", {}).fingerprint
