"""A mistake on the command line of a verb is a sentence that names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.verbs._table import VERBS

SMALL = (
    "data=synthetic", "data.dataset.samples=60", "data.dataset.classes=4", "data.image_size=8", "data.split.val=0.3",
    "data.batch_size=8", "epochs=1", "model=small_cnn", "model.width=4", "optimizer.lr=0.02",
)  # fmt: skip
RUN = "ckpt_path={run}"
SHORT_SEARCH = ("model=mlp", "model.hidden=[32]", "transform=none", "scheduler=constant", "num_steps=10")


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (("audit", "vary=data.workers:0,2"), ("vary.data.workers: varies what is not a key", "data.num_workers")),
        (("audit", "vary=threads:1,2,3"), ("vary.threads: has 3 values, but there are two sides", "vary=threads:A,B")),
        (("audit", "vary=data.batch_size:0"), ("vary: data.batch_size=0 cannot be run", "a whole number of at least 1")),
        (("audit", "a=one.pt"), ("b: is missing, and a is given", "b=PATH")),
        (("audit", "a=one.pt", "b=two.pt", "vary=seed:1"), ("vary: has no effect on checkpoints",)),
        (("audit", "a=one.pt", "b=two.pt"), ("a: there is no one.pt",)),
        (("audit", "steps=0"), ("steps: cannot be 0",)),
        (("audit", "steps=1", "data.batch_size=32", "data.root=nowhere", "data=image_folder"), ("data.root",)),
        (("bench", "togles=[amp]", "toggles=[ampp]", "repeats=1"),
         ("togles: is not a key; did you mean 'toggles'?", "toggles: cannot be ampp", "repeats: cannot be 1")),
        (("bench", "vary.data.batchsize=[1]", "vary.rate=[1]", "vary.optimizer=[sgd]", "vary.evaluate=[1]"),
         ("vary.data.batchsize: varies what is not a key; did you mean 'vary.data.batch_size'?",
          "vary.rate: varies what is not a key", "vary.optimizer: varies a whole section",
          "vary.evaluate: varies a whole section")),
        (("bench", "date"), ("date: is not an override",)),
        (("eval", RUN, "tta=[flip,five_crops]"), ("five_crop",)),
        (("find-lr", *SHORT_SEARCH, "start=1", "end=0.1"), ("start: is 1, and end is 0.1",)),
        (("find-lr", *SHORT_SEARCH, "num_steps=3"), ("num_steps: cannot be 3",)),
        (("find-lr", *SHORT_SEARCH, "lr=auto"), ("lr: can no longer be auto", "run find-lr, and set the number that it prints")),
        (("find-lr", *SHORT_SEARCH, "start=1e-9", "end=1e-7"),
         ("lr: no rate was found: the loss hardly falls at any rate from 1e-09 to 1e-07",)),
        (("find-lr", *SHORT_SEARCH, "optimizer.lr=0"), ("optimizer.lr: is 0",)),
        (("inspect", *SMALL, "features=haed"), ("features: the model has no layer 'haed'; did you mean 'head'?",)),
        (("inspect", *SMALL, "tensors=stage.1", "what=features"),
         ("tensors: the model has no layer 'stage.1'; did you mean 'stages.1'?",)),
        (("inspect", *SMALL, "tensors=stage.1", "what=activations"), ("tensors: the model has no layer 'stage.1'",)),
        (("inspect", "what=weights", "split=tset", "samples=0"),
         ("what: cannot be weights", "layers, activations, gradients, inputs, features or errors",
          "split: cannot be tset; did you mean 'test'?", "samples: cannot be 0")),
        (("inspect", *SMALL, "features=head", "output=f.csv"), ("output: cannot be f.csv",)),
        (("inspect", "ckpt_path=nowhere"), ("ckpt_path: there is no nowhere",)),
        (("inspect", RUN, "data.dataset.classes=3", "task.num_classes=null", "what=errors"), ("classes",)),
        (("predict", RUN), ("input: is missing",)),
        (("predict", RUN, "input=photo"), ("did you mean 'photos'?",)),
        (("predict", RUN, "input=photos/*.gif"), ("there is no image in photos/*.gif",)),
        (("predict", RUN, "input=[test,photos]"), ("'test' is a split of the data",)),
        (("predict", RUN, "input=test", "output=rows.xlsx"), ("output: cannot be 'rows.xlsx'",)),
        (("predict", RUN, "input=test", "top_k=9"), ("there are 4 classes",)),
        (("predict", RUN, "input=test", "tta=flop"), ("did you mean 'flip'?",)),
        (("predict", RUN, "input=test", "features=stage.2"), ("did you mean 'stages.2'?",)),
        (("predict", RUN, "input=test", "model.width=8"), ("of another shape",)),
        (("profile", "step=3", "warmup_steps=-1"),
         ("step: is not a key; did you mean 'steps'?", "warmup_steps: cannot be -1")),
        (("profile", *SMALL, "optimizer=sgd", "optimizer.lr=1e30", "log.every_steps=2", "scheduler=constant"),
         ("cannot be profiled: lower optimizer.lr",)),
    ],
    ids=lambda value: " ".join(value) if RUN in value or "=" in value[-1] else "",
)  # fmt: skip
def test_a_mistake_is_a_sentence(
    words: tuple[str, ...], messages: tuple[str, ...], trained: Path, rejected: Any, workdir: Path
) -> None:
    (workdir / "photos").mkdir()
    verb, *others = (word.format(run=trained) for word in words)
    result = rejected(verb, "threads=1", *others)
    assert [message for message in messages if message not in result.err] == []


@pytest.mark.parametrize(
    ("verb", "words", "meant"),
    [
        ("audit", "vary=threads:0,2 +vary=amp:bf16 vary={seed:1}", "vary.threads=[0,2] vary.amp=bf16 vary={seed:1}"),
        ("check", "only=labels,logits skip=modes", "only=[labels,logits] skip=[modes]"),
        ("check", "only=labels,logits -m", "only=[labels,logits] -m"),
        ("check", "--json --strict --train seed=1", "json=true strict=true train=true seed=1"),
        ("inspect", "features=a.b,c +what=layers what=null", "features=[a.b,c] +what=[layers] what=null"),
        ("inspect", "tensors=[x] seed=1,2 output=a,b", "tensors=[x] seed=1,2 output=a,b"),
    ],
)  # fmt: skip
def test_short_words_are_spelled_out_before_hydra_sees_them(verb: str, words: str, meant: str) -> None:
    assert VERBS[verb].expand_shorthand(words.split()) == meant.split()
