"""A text file of one's own: language modeling on any UTF-8 file."""

from __future__ import annotations

from normexp.data._dataset import Dataset
from normexp.data._files import absolute
from normexp.data._registry import DATASETS, DatasetCard
from normexp.data._texts import assemble_language_model
from normexp.data._vocabulary import TokenizerName
from normexp.errors import UserError

KEY = "data.params.path"


@DATASETS.register(
    "text_file",
    DatasetCard(
        description="a text file of your own: predict the next token",
        source="data.params.path",
        is_text=True,
    ),
)
def build_text_file(
    *,
    path: str,
    tokenizer: TokenizerName = "characters",
    max_vocabulary: int | None = None,
    context_length: int = 128,
    val_share: float = 0.1,
    test_share: float = 0.1,
    num_train: int | None = None,
) -> Dataset:
    """Return the text of a file in three parts: training, then validation, then test at its end.

    Line ends stay as they are; a byte order mark at the start is not part of the text.

    Args:
        path: The file, in UTF-8; ``~`` is the home folder.
        tokenizer: bytes, characters or words.
        max_vocabulary: Most token ids of characters or words; None for no limit.
        context_length: Positions of a sample.
        val_share: Share of the file's characters that validation takes, rounded.
        test_share: Share of the file's characters that the test takes, rounded.
        num_train: Samples of the training split, the first ones; None for all.

    Raises:
        UserError: If the file cannot be read, is no UTF-8 or is too short, or a size is impossible.
    """
    for key, share in (("val_share", val_share), ("test_share", test_share)):
        if not 0.0 < share < 1.0:
            raise UserError(f"data.params.{key}", share, "a share above 0 and below 1 is needed")
    if val_share + test_share >= 1.0:
        expected = f"with test_share={test_share} nothing of the file is left to train on"
        raise UserError("data.params.val_share", val_share, expected)
    text = read_text(path)
    num_test = round(test_share * len(text))
    num_train_val = len(text) - num_test
    num_train_only = num_train_val - round(val_share * len(text))
    return assemble_language_model(
        "text_file",
        {
            "train": [text[:num_train_only]],
            "val": [text[num_train_only:num_train_val]],
            "test": [text[num_train_val:]],
        },
        tokenizer=tokenizer,
        max_vocabulary=max_vocabulary,
        context_length=context_length,
        num_train=num_train,
    )


def read_text(path: str) -> str:
    """Return the text of a UTF-8 file, whatever the locale.

    Args:
        path: The file; ``~`` is the home folder.

    Raises:
        UserError: If it is not there, is a folder, cannot be read, or is no UTF-8.
    """
    file = absolute(path)
    try:
        return file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise UserError(KEY, file, "there is no such file") from error
    except IsADirectoryError as error:
        raise UserError(KEY, file, "this is a folder; a text file is needed") from error
    except OSError as error:
        raise UserError(KEY, file, f"cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        expected = f"no UTF-8: byte {error.start} cannot be read; convert the file first"
        raise UserError(KEY, file, expected) from error
