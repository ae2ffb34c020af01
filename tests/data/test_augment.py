import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normexp.data import AugmentDraws, augment, draw_augmentation


def augment_by_hand(images: np.ndarray, draws: AugmentDraws) -> np.ndarray:
    """One sample at a time: pad, cut out, mirror."""
    padding = draws.crop_padding
    _, _, height, width = images.shape
    out = np.empty_like(images)
    for i, image in enumerate(images):
        padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
        top, left = int(draws.dy[i]), int(draws.dx[i])
        crop = padded[:, top : top + height, left : left + width]
        out[i] = crop[:, :, ::-1] if draws.flip[i] else crop
    return out


def make_images(num_samples: int, channels: int, height: int, width: int) -> torch.Tensor:
    shape = (num_samples, channels, height, width)
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape).astype(np.float32))


@given(
    num_samples=st.integers(1, 9),
    channels=st.integers(1, 3),
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    crop_padding=st.integers(0, 4),
    horizontal_flip=st.booleans(),
    update=st.integers(0, 1000),
)
def test_augment_equals_one_sample_at_a_time(
    num_samples: int,
    channels: int,
    height: int,
    width: int,
    crop_padding: int,
    horizontal_flip: bool,
    update: int,
) -> None:
    images = make_images(num_samples, channels, height, width)
    draws = draw_augmentation(
        3, update, num_samples, crop_padding=crop_padding, horizontal_flip=horizontal_flip
    )
    # Values are only moved, so equality is exact.
    np.testing.assert_array_equal(
        augment(images, draws).numpy(), augment_by_hand(images.numpy(), draws)
    )


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 4, 6, 12])
def test_augment_does_not_depend_on_micro_batches(micro_batch_size: int) -> None:
    images = make_images(12, 3, 8, 8)
    draws = draw_augmentation(0, 5, 12, crop_padding=2, horizontal_flip=True)
    parts = [
        augment(images[i : i + micro_batch_size], draws[i : i + micro_batch_size])
        for i in range(0, 12, micro_batch_size)
    ]
    assert torch.equal(torch.cat(parts), augment(images, draws))


def test_augment_of_concatenated_updates_equals_update_by_update() -> None:
    images = make_images(12, 1, 8, 8)
    draws = [
        draw_augmentation(0, update, 4, crop_padding=1, horizontal_flip=True) for update in range(3)
    ]
    one_by_one = [augment(images[4 * k : 4 * k + 4], draws[k]) for k in range(3)]
    assert torch.equal(augment(images, AugmentDraws.concatenate(draws)), torch.cat(one_by_one))


def test_augment_keeps_dtype_and_leaves_its_input_alone() -> None:
    images = make_images(6, 2, 5, 5).double()
    before = images.clone()
    draws = draw_augmentation(0, 0, 6, crop_padding=2, horizontal_flip=True)
    assert augment(images, draws).dtype == torch.float64
    assert torch.equal(images, before)


def test_augment_pads_with_zeros() -> None:
    images = torch.ones(1, 1, 3, 3)
    corner = AugmentDraws(
        torch.tensor([0]), torch.tensor([0]), torch.tensor([False]), crop_padding=1
    )
    expected = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    assert torch.equal(augment(images, corner)[0, 0], expected)


def test_draws_repeat_for_seed_and_update_and_differ_otherwise() -> None:
    def draw(seed: int, update: int) -> torch.Tensor:
        draws = draw_augmentation(seed, update, 64, crop_padding=4, horizontal_flip=True)
        return torch.stack([draws.dy, draws.dx, draws.flip.long()])

    assert torch.equal(draw(0, 3), draw(0, 3))
    assert not torch.equal(draw(0, 3), draw(0, 4))
    assert not torch.equal(draw(0, 3), draw(1, 3))


def test_draws_of_a_sample_do_not_depend_on_how_many_there_are() -> None:
    few = draw_augmentation(0, 1, 5, crop_padding=3, horizontal_flip=True)
    many = draw_augmentation(0, 1, 50, crop_padding=3, horizontal_flip=True)[:5]
    assert torch.equal(few.dy, many.dy)
    assert torch.equal(few.dx, many.dx)
    assert torch.equal(few.flip, many.flip)


def test_draws_are_uniform_over_the_offsets_and_sides() -> None:
    num_samples = 50_000
    draws = draw_augmentation(0, 0, num_samples, crop_padding=2, horizontal_flip=True)
    # Five offsets: expected share 0.2, standard deviation of a share sqrt(0.16/50000) = 0.0018.
    for offsets in (draws.dy, draws.dx):
        shares = torch.bincount(offsets, minlength=5).double() / num_samples
        assert len(shares) == 5
        assert (shares - 0.2).abs().max() < 5 * 0.0018
    assert abs(draws.flip.double().mean() - 0.5) < 5 * 0.5 / num_samples**0.5
    # dy and dx are independent: correlation 0 with standard deviation 1/sqrt(n).
    pair = torch.stack([draws.dy.double(), draws.dx.double()])
    assert abs(torch.corrcoef(pair)[0, 1]) < 5 / num_samples**0.5


def test_no_padding_and_no_flip_is_the_identity() -> None:
    images = make_images(4, 1, 3, 3)
    draws = draw_augmentation(0, 0, 4, crop_padding=0, horizontal_flip=False)
    assert torch.equal(augment(images, draws), images)


def test_augment_refuses_another_number_of_draws() -> None:
    draws = draw_augmentation(0, 0, 3, crop_padding=1, horizontal_flip=False)
    with pytest.raises(ValueError, match="4 images but 3 draws"):
        augment(make_images(4, 1, 3, 3), draws)


def test_concatenate_refuses_different_paddings() -> None:
    draws = [
        draw_augmentation(0, 0, 2, crop_padding=padding, horizontal_flip=False)
        for padding in (1, 2)
    ]
    with pytest.raises(ValueError, match=r"found \[1, 2\]"):
        AugmentDraws.concatenate(draws)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_augment_is_the_same_on_a_gpu() -> None:
    images = make_images(32, 3, 32, 32)
    draws = draw_augmentation(0, 0, 32, crop_padding=4, horizontal_flip=True)
    assert torch.equal(augment(images.cuda(), draws).cpu(), augment(images, draws))
