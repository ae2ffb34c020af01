import dataclasses

import numpy as np
import pytest
import torch
from fake_data_files import make_raw
from hypothesis import given
from hypothesis import strategies as st

from normexp.data import Dataset
from normexp.data import _images as module
from normexp.data._images import RawImages, assemble_dataset
from normexp.errors import UserError


def assemble(
    train_val: RawImages,
    test: RawImages,
    *,
    num_val: int = 3,
    num_train: int | None = None,
    split_seed: int = 0,
    image_size: int | None = None,
) -> Dataset:
    return assemble_dataset(
        "fake",
        train_val,
        test,
        num_classes=10,
        max_value=255,
        split_seed=split_seed,
        num_val=num_val,
        num_train=num_train,
        image_size=image_size,
    )


def numbered(num_samples: int) -> RawImages:
    """Samples whose target is their own number."""
    return RawImages(make_raw(num_samples, (1, 2, 2), 10).images, np.arange(num_samples))


def with_pixel(raw: RawImages, index: int, value: int) -> RawImages:
    images = raw.images.copy()
    images[index, 0, 0, 0] = value
    return dataclasses.replace(raw, images=images)


@given(num_samples=st.integers(2, 40), data=st.data(), split_seed=st.integers(0, 5))
def test_training_and_validation_share_the_samples_without_overlap(
    num_samples: int, data: st.DataObject, split_seed: int
) -> None:
    num_val = data.draw(st.integers(1, num_samples - 1))
    dataset = assemble_dataset(
        "fake",
        numbered(num_samples),
        numbered(2),
        num_classes=num_samples,
        max_value=255,
        split_seed=split_seed,
        num_val=num_val,
        num_train=None,
        image_size=None,
    )
    train, val = dataset.train.targets.tolist(), dataset.val.targets.tolist()
    assert len(val) == num_val
    assert sorted(train + val) == list(range(num_samples))
    assert dataset.test.targets.tolist() == [0, 1]


def test_inputs_are_the_pixels_standardised_by_the_training_split() -> None:
    train_val, test = make_raw(20, (3, 4, 5), 10), make_raw(6, (3, 4, 5), 10)
    dataset = assemble(train_val, test)
    restored = dataset.test.inputs.double() * torch.tensor(dataset.std)[:, None, None]
    restored += torch.tensor(dataset.mean)[:, None, None]
    # float32 holds numbers up to about 2 to 1.2e-7; 255 times that.
    np.testing.assert_allclose(restored.numpy() * 255, test.images, atol=255 * 3e-7)
    pixels = dataset.train.inputs.double()
    np.testing.assert_allclose(pixels.mean(dim=(0, 2, 3)), 0, atol=1e-6)
    np.testing.assert_allclose(pixels.std(dim=(0, 2, 3), correction=0), 1, atol=1e-6)


def test_test_and_validation_images_do_not_touch_the_statistics() -> None:
    train_val, test = make_raw(20, (1, 4, 4), 10), make_raw(6, (1, 4, 4), 10)
    before = assemble(train_val, test)
    changed_test = assemble(train_val, with_pixel(test, 0, int(test.images[0, 0, 0, 0]) ^ 255))
    assert (changed_test.mean, changed_test.std) == (before.mean, before.std)

    statistics = set()
    for index in range(20):
        pixel = int(train_val.images[index, 0, 0, 0]) ^ 255
        changed = assemble(with_pixel(train_val, index, pixel), test)
        statistics.add((changed.mean, changed.std))
    # Three of the twenty are validation samples and change nothing; each other one does.
    assert (before.mean, before.std) in statistics
    assert len(statistics) == 1 + 17


def test_fingerprint_changes_with_one_pixel_one_label_the_order_and_the_size() -> None:
    train_val, test = make_raw(20, (1, 4, 4), 10), make_raw(6, (1, 4, 4), 10)
    labels = test.targets.copy()
    labels[0] = 9
    fingerprints = [
        dataset.fingerprint
        for dataset in (
            assemble(train_val, test),
            assemble(with_pixel(train_val, 7, int(train_val.images[7, 0, 0, 0]) ^ 1), test),
            assemble(train_val, with_pixel(test, 5, int(test.images[5, 0, 0, 0]) ^ 1)),
            assemble(train_val, dataclasses.replace(test, targets=labels)),
            assemble(train_val, test, split_seed=1),
            assemble(train_val, test, num_train=10),
            assemble(train_val, test, image_size=2),
        )
    ]
    assert len(set(fingerprints)) == len(fingerprints)
    assert assemble(train_val, test).fingerprint == fingerprints[0]
    # The stored size, spelled out, is the same data.
    assert assemble(train_val, test, image_size=4).fingerprint == fingerprints[0]


@pytest.mark.parametrize("image_size", [None, 3])
def test_chunks_change_nothing(image_size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    train_val, test = make_raw(20, (2, 4, 4), 10), make_raw(6, (2, 4, 4), 10)
    whole = assemble(train_val, test, image_size=image_size)
    monkeypatch.setattr(module, "CHUNK_SIZE", 3)
    chunked = assemble(train_val, test, image_size=image_size)
    if image_size is None:  # Whole numbers add exactly.
        assert (chunked.mean, chunked.std) == (whole.mean, whole.std)
        assert torch.equal(chunked.train.inputs, whole.train.inputs)
    torch.testing.assert_close(chunked.train.inputs, whole.train.inputs, rtol=1e-6, atol=1e-6)


def test_a_channel_without_contrast_becomes_zero() -> None:
    raw = make_raw(20, (2, 4, 4), 10)
    raw.images[:, 1] = 77
    dataset = assemble(raw, raw)
    assert dataset.std[1] == 1.0
    assert dataset.train.inputs[:, 1].abs().max() < 1e-6


def test_to_moves_every_tensor() -> None:
    dataset = assemble(make_raw(20, (1, 2, 2), 10), make_raw(6, (1, 2, 2), 10)).to("meta")
    for split in (dataset.train, dataset.val, dataset.test):
        assert split.inputs.is_meta
        assert split.targets.is_meta


def test_labels_outside_the_classes_are_refused() -> None:
    with pytest.raises(UserError, match=r"labels from 0 to 9 are needed, found 1\d$"):
        assemble(numbered(20), numbered(2))
