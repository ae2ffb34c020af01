"""Python's own documentation, the help topics that every installation carries: language modeling.

Source: the Python Software Foundation's language reference, as the module ``pydoc_data.topics`` of
the running interpreter; its words change a little with Python's version, and so does the
fingerprint.
"""

from __future__ import annotations

from normexp.data._dataset import Dataset
from normexp.data._registry import DATASETS, DatasetCard
from normexp.data._texts import assemble_language_model
from normexp.data._vocabulary import TokenizerName
from normexp.errors import UserError
from normexp.random import random_stream


@DATASETS.register(
    "python_docs",
    DatasetCard(
        description="Python's help topics: predict the next token; comes with Python",
        source="pydoc_data.topics of the running Python",
        is_text=True,
    ),
)
def build_python_docs(
    *,
    tokenizer: TokenizerName = "characters",
    max_vocabulary: int | None = None,
    context_length: int = 128,
    split_seed: int = 0,
    num_val_topics: int = 8,
    num_test_topics: int = 8,
    num_train: int | None = None,
) -> Dataset:
    """Return the topics, split by topic: no split has a part of another's text.

    Args:
        tokenizer: bytes, characters or words.
        max_vocabulary: Most token ids of characters or words; None for no limit.
        context_length: Positions of a sample.
        split_seed: Seed of the permutation of the topics.
        num_val_topics: Topics of the validation split.
        num_test_topics: Topics of the test split.
        num_train: Samples of the training split, the first ones; None for all.

    Raises:
        UserError: If a size is impossible.
    """
    # Imported here: half a megabyte that listing data sets does not need.
    from pydoc_data.topics import topics

    names = sorted(topics)
    for key, count in (("num_val_topics", num_val_topics), ("num_test_topics", num_test_topics)):
        if not 1 <= count <= len(names) - 2:
            expected = f"a whole number from 1 to {len(names) - 2} is needed, of {len(names)}"
            raise UserError(f"data.params.{key}", count, expected)
    num_held = num_val_topics + num_test_topics
    if num_held >= len(names):
        expected = f"{num_held} of {len(names)} topics are held out, and training needs one"
        raise UserError("data.params.num_val_topics", num_val_topics, expected)
    order = random_stream(split_seed, "topic_split", "python_docs").permutation(len(names))
    texts = [topics[names[index]] for index in order]
    return assemble_language_model(
        "python_docs",
        {
            "train": texts[num_held:],
            "val": texts[num_test_topics:num_held],
            "test": texts[:num_test_topics],
        },
        tokenizer=tokenizer,
        max_vocabulary=max_vocabulary,
        context_length=context_length,
        num_train=num_train,
    )
