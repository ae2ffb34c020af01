"""Python's own documentation, the help topics that every installation carries: language modeling.

Source: the Python Software Foundation's language reference, as the module ``pydoc_data.topics`` of
the running interpreter; its words change a little with Python's version, and so does the
fingerprint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from normexp.data._dataset import Dataset
from normexp.data._registry import DATASETS, DatasetCard
from normexp.data._texts import assemble_language_model
from normexp.data._vocabulary import TokenizerName
from normexp.errors import UserError
from normexp.random import random_stream

# A paragraph of so many characters is a passage: text that no two splits may share.
PASSAGE_LENGTH = 40


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

    Some topics hold others, as the one on compound statements does those on if and while. So only
    topics that share no passage with another are held out, and the others train.

    Args:
        tokenizer: bytes, characters or words.
        max_vocabulary: Most token ids of characters or words; None for no limit.
        context_length: Positions of a sample.
        split_seed: Seed of the permutation of the topics.
        num_val_topics: Topics of the validation split, of those that share no passage.
        num_test_topics: Topics of the test split, of those that share no passage.
        num_train: Samples of the training split, the first ones; None for all.

    Raises:
        UserError: If a size is impossible.
    """
    # Imported here: half a megabyte that listing data sets does not need.
    from pydoc_data.topics import topics

    names = sorted(topics)
    order = random_stream(split_seed, "topic_split", "python_docs").permutation(len(names))
    shared = find_sharing(topics)
    alone = [names[index] for index in order if names[index] not in shared]
    for key, count in (("num_val_topics", num_val_topics), ("num_test_topics", num_test_topics)):
        if not 1 <= count < len(alone):
            expected = f"a whole number from 1 to {len(alone) - 1} is needed: so many topics share"
            raise UserError(f"data.params.{key}", count, f"{expected} no text with another")
    num_held = num_val_topics + num_test_topics
    if num_held > len(alone):
        expected = f"with num_test_topics={num_test_topics} {len(alone) - num_test_topics} or fewer"
        raise UserError("data.params.num_val_topics", num_val_topics, f"{expected} are needed")
    held = alone[:num_held]
    return assemble_language_model(
        "python_docs",
        {
            "train": [topics[names[index]] for index in order if names[index] not in held],
            "val": [topics[name] for name in held[num_test_topics:]],
            "test": [topics[name] for name in held[:num_test_topics]],
        },
        tokenizer=tokenizer,
        max_vocabulary=max_vocabulary,
        context_length=context_length,
        num_train=num_train,
    )


def find_sharing(documents: Mapping[str, str]) -> set[str]:
    """Return the names of documents that share a passage with another.

    A passage is a paragraph of ``PASSAGE_LENGTH`` characters or more, however its lines are
    broken and indented.

    Args:
        documents: Texts by name, paragraphs apart by an empty line.
    """
    passages = {name: _list_passages(text) for name, text in documents.items()}
    counts = Counter(passage for found in passages.values() for passage in found)
    return {name for name, found in passages.items() if any(counts[one] > 1 for one in found)}


def _list_passages(text: str) -> set[str]:
    paragraphs = (" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
    return {paragraph for paragraph in paragraphs if len(paragraph) >= PASSAGE_LENGTH}
