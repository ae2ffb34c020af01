"""Bad input: one line with key, value and what would be right; code 2; nothing written."""

from __future__ import annotations

import gzip
import subprocess
from pathlib import Path

import numpy as np
import pytest
from command_line import COMMAND, Outcome, normexp

from normexp.norms import NORMS
from normexp.records import write_plan

# Stand for words that a command on texts needs.
TEXT_WORDS = {
    "LANGUAGE": "data=python_docs model=transformer placement=pre",
    "TEXTS": "data=docstrings model=transformer placement=pre",
}

BAD_INPUT = [
    # names
    ("train norm=grup_norm", "norm=grup_norm: did you mean group_norm", "batch_norm, group_norm"),
    ("train model=resnt", "model=resnt: did you mean cifar_resnet? choices:", "mlp"),
    ("train data=digit", "data=digit: did you mean digits? choices:", "fashion_mnist"),
    ("train placement=midle", "placement=midle: choices:", "none, post, pre, res_post"),
    ("train logger=wandbb", "logger=wandbb: did you mean wandb? choices:", "csv"),
    ("train experiment=quikstart", "experiment=quikstart: did you mean quickstart?", "small_batch"),
    ("run experiment=quikstart", "experiment=quikstart: did you mean quickstart?", "small_batch"),
    ("run", "experiment=: name one, as in experiment=quickstart", "choices:"),
    ("run experiment=quickstart experiment.select.metric=val/loss",
     "experiment.select.factor=: no factor of the grid; choices: micro_batch_size", ""),
    ("train data=text_file data.params.path='~nobody.there/x'",
     "data.params.path=~nobody.there/x: there is no such home folder", ""),
    ("train output_root='~nobody.there/x'", "output_root=~nobody.there/x: there is no such", ""),
    ("train precision=16", "precision=16: choices:", "32-true, 64-true, bf16-mixed"),
    ("train probes=[stat]", "probes=stat: choices:", "running_statistics"),
    ("train +norm.roles.stem.name=nope", "norm.roles.stem=nope: choices:", "batch_norm"),
    ("train +norm.roles.stam.name=group_norm", "norm.roles.stam=", "did you mean stem?"),
    ("train norm.roles.stam.name=group_norm", "norm.roles.stam.name=group_norm: there is no ",
     "norm.roles.stam; did you mean stem?"),
    ("sweep norm=batch_norm,group_norm norm.params.momentum=0.2",
     "norm.params.momentum=0.2: group_norm has no such parameter; set it in a grid block", ""),
    ("train optimizer.decay_roles=[wieght]", "optimizer.decay_roles=wieght:", "mean weight?"),
    # R61: parameters that no such choice has
    ("train norm=group_norm norm.params.num_gruops=3", "norm.params.num_gruops=3:", "num_groups?"),
    ("train norm=group_norm +norm.params.num_gruops=3", "norm.params.num_gruops=3:", "num_groups?"),
    ("train norm=group_norm norm.params.momentum=0.1", "norm.params.momentum=0.1:", "affine"),
    ("train modle=mlp", "modle=mlp: there is no such key; did you mean model?", ""),
    ("train +budget.epoch=3", "budget.epoch=3: there is no such key; did you mean epochs?", ""),
    ("train data.augment.crop_pad=2", "data.augment.crop_pad=2:", "did you mean crop_padding?"),
    ("train +logger.trackers.wandbb={}", "logger.trackers.wandbb={}: did you mean wandb?", ""),
    # types, and R63: lists where a number belongs
    ("train micro_batch_size=[2,4]", "micro_batch_size=[2,4]: a whole number is needed",
     "normexp sweep micro_batch_size=2,4"),
    ("train micro_batch_size=2,4", "micro_batch_size=2,4: several values need a sweep",
     "normexp sweep micro_batch_size=2,4"),
    ("train norm=[batch_norm,group_norm]", "norm=[batch_norm,group_norm]: one choice",
     "normexp sweep norm=batch_norm,group_norm"),
    ("train norm=batch_norm,group_norm", "norm=batch_norm,group_norm: several values need a sweep",
     "normexp sweep norm=batch_norm,group_norm"),
    ("train model.params.depth=[8,14]", "model.params.depth=[8, 14]: a value of type int", ""),
    ("train micro_batch_size=2.5", "micro_batch_size=2.5: a whole number is needed", ""),
    ("train optimizer.lr=fast", "optimizer.lr=fast: a number is needed", ""),
    ("train optimizer.lr=null", "optimizer.lr=null: a value is needed", ""),
    ("train norm.params.eps=big", "norm.params.eps=big: a value of type float is needed", ""),
    ("train seeds=3", "seeds=3: a list is needed, as in seeds=[3]", ""),
    # R50: seeds
    ("train seeds=[-1]", "seeds=[-1]: -1 is outside of 0..2^63-1", ""),
    ("train seeds=[1.5]", "seeds=[1.5]: a whole number is needed", ""),
    ("train seeds=[0,0]", "seeds=[0, 0]: a seed twice", "name each once"),
    ("train seeds=[]", "seeds=[]: at least one seed is needed", "seeds=[0,1,2]"),
    # numbers
    ("train micro_batch_size=0", "micro_batch_size=0: 1 or more is needed", ""),
    ("train optimizer.lr=nan", "optimizer.lr=nan: a number above 0 is needed", ""),
    ("train schedule.warmup_fraction=1", "schedule.warmup_fraction=1.0: a share in [0, 1)", ""),
    ("train budget.samples=10", "budget={epochs: 4.0, samples: 10}: set exactly one", "null"),
    ("train budget.epochs=null", "budget={nothing}: set exactly one", "epochs, samples, updates"),
    ("train num_evaluations=126", "num_evaluations=126: the budget gives 125 updates", "or fewer"),
    ("train evaluation=batch", "evaluation=batch: a group of keys; set one of them, as in",
     "evaluation.statistics=batch"),
    ("train optimizer.lr_factors=3", "optimizer.lr_factors=3: a group of keys; set one of them",
     "optimizer.lr_factors.weight=3"),
    # what does not fit the model or the data
    ("train norm=group_norm norm.params.num_groups=7", "norm.params.num_groups=7: does not divide",
     "16 channels of a layer; its divisors are 1, 2, 4, 8, 16"),
    ("train norm=group_norm norm.params.channels_per_group=4", "norm.params.channels_per_group=4:",
     "set one of the two and the other to null"),
    ("train norm=layer_norm", "norm=layer_norm: not defined for images", "layer_norm_chw"),
    ("train placement=none", "placement=none: builds no norm layer, so norm must be no_norm", ""),
    ("train model.params.depth=9", "model.params.depth=9: 6n+2 is needed", "8, 14, 20"),
    ("train model.params.num_stages=4 micro_batch_size=1", "norm=batch_norm: layer stages.3.0.",
     "[1, 128, 1, 1]); 2 or more are needed"),
    ("train model.params.num_stages=4 norm=instance_norm", "norm=instance_norm: layer stages.3.",
     "2 or more are needed"),
    ("train micro_batch_size=1001", "micro_batch_size=1001: the training split of digits has 1000",
     "1000 or fewer"),
    ("train micro_batch_size=600 accumulation_steps=2", "accumulation_steps=2: 600 x 2 samples",
     "1 or fewer"),
    # texts: what may see what, and what fits them
    ("train norm=batch_norm LANGUAGE", "norm=batch_norm: layer blocks.0.attention.norm_before has ",
     "allow_leak=true, which marks every row"),
    ("train norm=layer_norm norm.roles.mlp.name=group_norm LANGUAGE", "layer "
     "blocks.0.mlp.norm_before has statistics over positions", "such as layer_norm"),
    ("sweep norm=layer_norm,batch_norm LANGUAGE", "norm=batch_norm: layer blocks.0.", "allow_leak"),
    ("train norm=spectral_band_norm TEXTS", "norm=spectral_band_norm: layer blocks.0.attention.",
     "model.params.mask_norms=false lets it see padding"),
    ("train norm=batch_norm model.params.mask_norms=false TEXTS", "data.params.padding=batch: ",
     "longest is needed"),
    ("train norm=instance_norm TEXTS", "norm=instance_norm: layer final_norm centres each channel",
     "norm.roles.final.name=layer_norm"),
    ("train norm=layer_norm data.params.padding_share=0.5 TEXTS", "data.params.padding_share=0.5:",
     "padding=longest is needed"),
    ("train norm=layer_norm data.augment.crop_padding=2 LANGUAGE", "data.augment.crop_padding=2: ",
     "python_docs has texts, not images"),
    ("train norm=layer_norm data.augment.horizontal_flip=true TEXTS",
     "data.augment.horizontal_flip=True: docstrings has texts, not images", ""),
    ("train norm=layer_norm model=transformer", "model=transformer: takes texts", "data have none"),
    ("train norm=layer_norm data=python_docs model=mlp", "model=mlp: takes images or features",
     "and the data have texts"),
    ("train norm=layer_norm data.params.context_length=1 LANGUAGE", "data.params.context_length=1:",
     "2 or more"),
    ("train norm=layer_norm data.params.context_length=200000 LANGUAGE", "split of python_docs ",
     "tokens, and a block needs one more"),
    ("train norm=layer_norm data.params.tokenizer=letters LANGUAGE", "data.params.tokenizer=let",
     "characters"),
    ("train norm=layer_norm data.params.max_vocabulary=3 LANGUAGE", "data.params.max_vocabulary=3:",
     "more than 3 are needed"),
    ("train norm=layer_norm data.params.tokenizer=bytes data.params.max_vocabulary=9 LANGUAGE",
     "data.params.max_vocabulary=9: null is needed", "has all 256"),
    ("train norm=layer_norm micro_batch_size=5000 LANGUAGE", "micro_batch_size=5000: the training ",
     "split of python_docs has"),
    ("train allow_leak=maybe", "allow_leak=maybe:", "true or false"),
    # files and folders
    ("train data=fashion_mnist data.params.root=/nope", "data.params.root=/nope: there is no such",
     "train-images-idx3-ubyte.gz"),
    ("train plugins=[nope.py]", "plugins=nope.py: there is no such file", ""),
    ("train name=../x", "name=../x: a folder name of letters", ""),
    ("train output_root=/dev/null", "output_root=/dev/null: /dev/null/scratch cannot be made", ""),
    # a whole sweep is checked before its first cell trains
    ("sweep norm=batch_norm,grup_norm", "norm=grup_norm: did you mean group_norm", ""),
    ("sweep norm=group_norm norm.params.num_groups=8,7", "norm.params.num_groups=7: does not", ""),
    ("sweep micro_batch_size=32,1 model.params.num_stages=4", "norm=batch_norm: layer", ""),
    ("run experiment=quickstart micro_batch_size=2,1", "norm=batch_norm: layer stages.3", ""),
    ("sweep name=a,b", "name=a,b: one value for the whole sweep", ""),
    ("sweep hydra.launcher.num_jobs=0", "hydra.launcher.num_jobs=0: 1 or more is needed", ""),
    ("sweep hydra/launcher=locl", "hydra/launcher=locl: did you mean local?", "basic"),
    # words that are no overrides, other verbs
    ("train norm", "norm: cannot be read as key=value", ""),
    ("train --config-dir=/nope", "'/nope' not found", ""),
    ("train --frob", "command line=--frob: unrecognized arguments", ""),
    ("train norm=null", "norm=null: choices: adaptive_group_norm", ""),
    ("train ~norm", "norm.name=???: a value is needed", ""),
    ("train micro_batch_size=???", "micro_batch_size=???: a value is needed", ""),
    ("frobnicate", "command=frobnicate: choices: check, inspect, list, report", "sweep, train"),
    ("list nrms", "list=nrms: did you mean norms? choices: data, experiments", ""),
    ("list", "kind=: norms, models, data", ""),
    ("status /nope", "folder=/nope: holds no experiment.json", "name the folder of a sweep"),
    ("report /nope", "=/nope: ", "experiment.json"),
    ("status", "folder=: ", "results/quickstart"),
]  # fmt: skip


def assert_refused(outcome: Outcome, *fragments: str) -> None:
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1, outcome.err
    assert outcome.err.startswith("normexp: ")
    for fragment in fragments:
        assert fragment in outcome.err


@pytest.mark.parametrize(("command", "fault", "right"), BAD_INPUT, ids=lambda text: text[:60])
def test_bad_input_is_refused_before_anything_is_written(
    tmp_path: Path, command: str, fault: str, right: str
) -> None:
    for word, words in TEXT_WORDS.items():
        command = command.replace(word, words)
    assert_refused(normexp(*command.split()), fault, right)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["train norm=grup_norm", "frobnicate"])
def test_a_process_of_its_own_ends_the_same_way(tmp_path: Path, command: str) -> None:
    ended = subprocess.run(
        [*COMMAND, *command.split()], cwd=tmp_path, capture_output=True, text=True
    )
    assert_refused(Outcome(ended.returncode, ended.stdout, ended.stderr), "choices: ")
    assert list(tmp_path.iterdir()) == []


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes(), mtime=0)


@pytest.fixture
def data_files(tmp_path: Path) -> Path:
    """Four files in the format of Fashion-MNIST, with eight images."""
    folder = tmp_path / "files"
    folder.mkdir()
    for prefix in ("train", "t10k"):
        images = np.arange(8 * 28 * 28).reshape(8, 28, 28) % 251
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(idx(images))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(idx(np.arange(8)))
    return folder


TRAIN_ON_FILES = [
    "train",
    "data=fashion_mnist",
    "data.params.root=files",
    "data.params.num_val=2",
    "data.params.verify_checksum=false",
    "micro_batch_size=2",
    "num_evaluations=1",
    "budget.epochs=null",
    "budget.updates=1",
    "seeds=[0]",
]


def test_files_that_are_right_are_taken(data_files: Path) -> None:
    # Else the refusals below could have another reason.
    assert normexp(*TRAIN_ON_FILES).code == 0


@pytest.mark.parametrize("fault", ["missing", "truncated", "no gzip", "other content", "labels"])
def test_a_data_file_that_is_wrong_is_named(data_files: Path, tmp_path: Path, fault: str) -> None:
    images = data_files / "train-images-idx3-ubyte.gz"
    whole = images.read_bytes()
    if fault == "missing":
        images.unlink()
    elif fault == "truncated":
        images.write_bytes(whole[: len(whole) // 2])
    elif fault == "no gzip":
        images.write_bytes(b"<html>not found</html>")
    elif fault == "other content":
        images.write_bytes(idx(np.arange(8)))
    else:
        images.write_bytes(idx(np.zeros((7, 28, 28))))
    outcome = normexp(*TRAIN_ON_FILES)
    assert_refused(outcome, "data.params.root=", str(data_files), "train-")
    assert list(tmp_path.iterdir()) == [data_files]


def test_a_changed_file_fails_its_checksum(data_files: Path) -> None:
    outcome = normexp(*TRAIN_ON_FILES, "data.params.verify_checksum=true")
    assert_refused(outcome, "data.params.root=", "checksum")


def test_the_folder_of_another_experiment_is_left_alone(tmp_path: Path) -> None:
    # R53: never a mix of two experiments' files.
    folder = tmp_path / "results" / "mine"
    write_plan(folder, {"experiment": "other", "cells": []})
    before = (folder / "experiment.json").read_bytes()
    for command in (["train", "name=mine"], ["run", "experiment=quickstart", "name=mine"]):
        outcome = normexp(*command)
        assert_refused(outcome, f"name=mine: {folder} holds other", "choose another name")
    assert (folder / "experiment.json").read_bytes() == before
    assert [path.name for path in folder.iterdir()] == ["experiment.json"]


def test_a_report_of_a_folder_without_runs_says_so(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_refused(normexp("report", "empty"), "=empty: ", "experiment.json")
    assert_refused(normexp("status", "empty"), "folder=empty: ", "experiment.json")
    assert list((tmp_path / "empty").iterdir()) == []


CARD = """
import dataclasses
from torch import nn
from normexp.norms import NORMS
card = dataclasses.replace(NORMS.get("no_norm").card)
"""
FAULTY_PLUGINS = {
    "bare": ("@NORMS.register('own', None)\ndef build(num_features, *, dims): ...",
             "plugins=", "norm 'own' needs a card: a NormCard, not NoneType"),
    "dims": ("@NORMS.register('own', card)\ndef build(num_features): return nn.Identity()",
             "norm=own: its builder ended in TypeError:", "'dims'"),
    "raises": ("@NORMS.register('own', card)\ndef build(c, *, dims): raise OSError('a\\nb')",
               "norm=own: its builder ended in OSError: a b", ""),
    "number": ("@NORMS.register('own', card)\ndef build(c, *, dims): return 3",
               "norm=own: its builder has to return a module, not int", ""),
    "sets": ("card = dataclasses.replace(card, statistic_sets={})\n"
             "@NORMS.register('own', card)\ndef build(c, *, dims): return nn.Identity()",
             "norm=own: its card needs sets of axes in statistic_sets", "normexp check own"),
    "axes": ("card = dataclasses.replace(card, dims=(2,), statistic_sets={2: (('chanel',),)})\n"
             "@NORMS.register('own', card)\ndef build(c, *, dims): return nn.Identity()",
             "norm=own: its card needs sets of axes in statistic_sets", "[2]"),
}  # fmt: skip


@pytest.mark.parametrize("verb", ["train", "inspect"])
@pytest.mark.parametrize("fault", FAULTY_PLUGINS)
def test_a_faulty_norm_of_the_users_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, fault: str
) -> None:
    monkeypatch.setattr(NORMS, "_entries", dict(NORMS._entries))
    code, told, right = FAULTY_PLUGINS[fault]
    plugin = tmp_path / f"{fault}_{verb}_plugin.py"
    plugin.write_text(CARD + code + "\n")
    assert_refused(normexp(verb, f"plugins=[{plugin}]", "norm=own"), told, right)
    assert list(tmp_path.iterdir()) == [plugin]
