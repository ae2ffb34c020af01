"""Small files in the forms in which the Hub and the authors publish texts."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

# Lines as the Hub has them: empty ones hold nothing, others end in a line feed. Python takes
# U+2028 for the end of a line, the data set does not.
WIKI_LINES = {
    "train": [
        "",
        " = Alpha = \n",
        "",
        " First of = Alpha = . \n",
        " = Not alone = \n",
        "",
        " = = Section = = \n",
        "",
        " Second of naïve\u2028Alpha . \n",
        "",
        "",
        " = Beta = \n",
        "",
        " Only of Beta . \n",
        "",
    ],
    "validation": ["", " = Gamma = \n", "", " valword . \n", "", " = Delta = \n", "", " end . \n"],
    "test": ["", " = Epsilon = \n", "", " testword . \n", "", " = Zeta = \n", "", " last . \n"],
}


def write_parquet(path: Path, **columns: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def write_shards(folder: Path, split: str, num_shards: int, **columns: Sequence[object]) -> None:
    """The rows in several files, named as on the Hub."""
    size = -(-len(next(iter(columns.values()))) // num_shards)
    for index in range(num_shards):
        part = {name: values[index * size : (index + 1) * size] for name, values in columns.items()}
        write_parquet(folder / f"{split}-{index:05d}-of-{num_shards:05d}.parquet", **part)


def write_readme(root: Path, config: str, folder: str, splits: Sequence[str]) -> None:
    """What tells the package ``datasets`` which files are which split."""
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split in splits:
        lines += [f"  - split: {split}", f"    path: {folder}/{split}-*"]
    (root / "README.md").write_text("\n".join([*lines, "---", ""]))


def write_hub_wikitext(root: Path, num_shards: int = 1) -> None:
    for split, lines in WIKI_LINES.items():
        write_shards(root / "wikitext-2-raw-v1", split, num_shards, text=lines)
    # Beside it lies another one, whose words are cut.
    write_shards(root / "wikitext-2-v1", "train", 1, text=["", " = <unk> = \n", ""])


def write_original_wikitext(root: Path) -> None:
    root.mkdir(parents=True)
    for split, stem in (("train", "train"), ("validation", "valid"), ("test", "test")):
        content = "".join(line or " \n" for line in WIKI_LINES[split])
        (root / f"wiki.{stem}.raw").write_bytes(content.encode("utf-8"))


def news(num_texts: int, prefix: str) -> tuple[list[str], list[str], list[int]]:
    """Titles, descriptions and topics; each text says which topic it has."""
    topics = [index % 4 for index in range(num_texts)]
    titles = [f'Title{index}, of "{prefix}"' for index in range(num_texts)]
    return titles, [f"topic{topic} \\ {prefix}{i}" for i, topic in enumerate(topics)], topics


def write_hub_news(root: Path, sizes: dict[str, int], num_shards: int = 1) -> None:
    for split, size in sizes.items():
        titles, descriptions, topics = news(size, split)
        texts = [f"{title} {rest}" for title, rest in zip(titles, descriptions, strict=True)]
        write_shards(root / "data", split, num_shards, text=texts, label=topics)


def write_original_news(root: Path, sizes: dict[str, int]) -> None:
    root.mkdir(parents=True)
    for split, size in sizes.items():
        rows = zip(*news(size, split), strict=True)
        quoted = [(str(topic + 1), title.replace('"', '""'), rest) for title, rest, topic in rows]
        lines = [",".join(f'"{cell}"' for cell in row) for row in quoted]
        (root / f"{split}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def reviews(num_each: int, split: str) -> dict[str, list[str]]:
    """Reviews by opinion; each text says which one it has."""
    return {
        opinion: [f"{opinion}word<br />{split}{index}" for index in range(num_each)]
        for opinion in ("neg", "pos")
    }


def write_hub_imdb(root: Path, num_each: int = 10) -> None:
    """In the order of the labels, as published."""
    for split in ("train", "test"):
        texts = reviews(num_each, split)
        labels = [0] * num_each + [1] * num_each
        write_shards(root / "plain_text", split, 1, text=texts["neg"] + texts["pos"], label=labels)
    write_shards(root / "plain_text", "unsupervised", 1, text=["secretword"], label=[-1])
    write_readme(root, "plain_text", "plain_text", ("train", "test", "unsupervised"))


def write_original_imdb(root: Path, num_each: int = 10) -> None:
    for split in ("train", "test"):
        for opinion, texts in reviews(num_each, split).items():
            folder = root / split / opinion
            folder.mkdir(parents=True)
            for index, text in enumerate(texts):
                (folder / f"{index}_9.txt").write_text(text, encoding="utf-8")
    (root / "train" / "unsup").mkdir()
    (root / "train" / "unsup" / "0_0.txt").write_text("secretword")
