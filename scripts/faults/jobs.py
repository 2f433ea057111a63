"""The trainings that are tormented: small, and each with something that a resume could get wrong."""

from __future__ import annotations

from pathlib import Path

from runner.config import keys
from runner.config.schema import Train

# About 20 steps an epoch, a checkpoint every third.
COMMON = (
    "threads=1", "logger=none", "log.progress=false", "log.curves=false", "log.every_steps=7", "evaluate.test=false",
    "data.batch_size=64",
    "checkpoint.min_seconds=0", "checkpoint.every_steps=3", "device=cpu",
)  # fmt: skip
_STRONG = ("transform=strong", "data.shift=0.125", "model.dropout=0.2")
_WORKERS = (*_STRONG, "data.placement=disk", "epochs=3")

_OWN = (f"--config-dir={Path(__file__).with_name('conf')}", "model=mlp", "~model.hidden", "~model.dropout")
_VECTORS = (*_OWN, "experiment=vectors", "epochs=4")
_DETR = (
    _OWN[0], "experiment=boxes", "transform=detection", "transform.close_epochs=1", "transform.sample_train.1.p=1", "epochs=3",
    "data.dataset.samples=60", "data.batch_size=4", "evaluate.batch_size=4", "ema=0.9", "grad_clip.norm=0.1",
    "optimizer=adamw", "optimizer.no_decay=auto", "optimizer.lr_mult={net.model.backbone:0.1}",
    "model=transformers_detection", "model.size=64",
    "model.options={d_model:32,encoder_hidden_dim:32,encoder_ffn_dim:32,decoder_ffn_dim:32,encoder_layers:1,decoder_layers:2,"
    "encoder_attention_heads:2,decoder_attention_heads:2,num_queries:20,num_denoising:10,encoder_in_channels:[16,16,32],"
    "decoder_in_channels:[32,32,32],backbone_config:{model_type:rt_detr_resnet,embedding_size:8,hidden_sizes:[8,16,16,32],"
    "depths:[1,1,1,1],layer_type:basic,out_indices:[2,3,4]}}",
)  # fmt: skip
ANY_WORKERS = "data.num_workers=0,1,2"
"""One of these numbers for each life of a run."""
_NETWORK = ("model._target_=torch.nn.Linear", "+model.in_features=8", "+model.out_features=64")

CONFIGURATIONS: dict[str, tuple[str, ...]] = {
    "BatchNorm and dropout": ("model.dropout=0.3", "epochs=4"),
    "augmentation": (*_STRONG, "epochs=4"),
    "no worker": (*_WORKERS, "data.num_workers=0"),
    "1 worker": (*_WORKERS, "data.num_workers=1"),
    "3 workers": (*_WORKERS, "data.num_workers=3", "data.prefetch=4"),
    "accumulation of 3 batches": (*_STRONG, "accumulate=3", "epochs=6", "grad_clip.norm=1.0"),
    "bf16": (*_STRONG, "amp=bf16", "epochs=4"),
    "fp16 with a gradient scaler": (*_STRONG, "amp=fp16", "grad_clip.norm=1.0", "epochs=4"),
    "compiled model": ("compile=model", "data.drop_last=true", "epochs=8"),
    "synchronous checkpoints": (*_STRONG, "checkpoint.async=false", "epochs=4"),
    "max_steps inside an epoch": (*_STRONG, "epochs=null", "max_steps=67"),
    "sgd, plateau": ("optimizer=sgd", "scheduler=plateau", "scheduler.patience=1", "evaluate.every_steps=5", "epochs=4"),
    "adam, cosine": ("optimizer=adam", "scheduler=cosine", "scheduler.warmup=5", "epochs=4"),
    "adamw, onecycle": ("optimizer=adamw", "scheduler=onecycle", "optimizer.amsgrad=true", "epochs=4"),
    "rmsprop, step": ("optimizer=rmsprop", "scheduler=step", "scheduler.every=1", "epochs=4"),
    "muon, wsd": ("model=mlp", "optimizer=muon", "scheduler=wsd", "epochs=4"),
    "sgd, constant": ("optimizer=sgd", "scheduler=constant", "callbacks=early_stopping", "epochs=4"),
    "average of the weights": (*_STRONG, "ema=0.99", "optimizer.no_decay=auto", "grad_clip.agc=0.02", "epochs=4"),
    "frozen at first": ("freeze=[stages.0]", "unfreeze_at=2ep", "swa=0.5", "evaluate.every_steps=9", "epochs=4"),
    "own step, 2 workers": (
        *_VECTORS, "model._target_=faults.tasks.Autoencoder", "task._target_=faults.tasks.Reconstruct",
        "data.num_workers=2", "ema=0.9",
    ),
    "several optimizers": (
        *_VECTORS, *_NETWORK, "task._target_=faults.tasks.Adversaries", "optimizer=two", "accumulate=2", "data.batch_size=32",
        "data.num_workers=0",
    ),
    "several optimizers, fp16, 2 workers": (
        *_VECTORS, *_NETWORK, "task._target_=faults.tasks.Adversaries", "optimizer=two", "amp=fp16", "grad_clip.norm=1.0",
        "data.num_workers=2",
    ),
    "l-bfgs": ("model=mlp", "model.hidden=[16]", "optimizer=lbfgs", "optimizer.max_iter=3", "optimizer.lr=0.1", "epochs=4"),
    "segmentation": (
        *_OWN, "experiment=masks", "model._target_=faults.scenes.Segmenter", "data.batch_size=7", "epochs=2", "ema=0.9",
        "data.num_workers=0",
    ),
    "segmentation, fp16, 2 workers": (
        *_OWN, "experiment=masks", "model._target_=faults.scenes.Segmenter", "data.batch_size=7", "epochs=2", "amp=fp16",
        "accumulate=2", "data.num_workers=2",
    ),
    "detection": (
        *_OWN, "experiment=boxes", "model._target_=faults.scenes.Detector", "data.batch_size=7", "epochs=2",
        "data.num_workers=0",
    ),
    "detection, 2 workers": (
        *_OWN, "experiment=boxes", "model._target_=faults.scenes.Detector", "data.batch_size=7", "epochs=2", "accumulate=2",
        "grad_clip.norm=1.0", "data.num_workers=2",
    ),
    "RT-DETRv2, mosaics, 0 to 2 workers": (*_DETR, ANY_WORKERS),
    "all together": (
        *_STRONG, "accumulate=3", "amp=fp16", "data.placement=disk", "data.num_workers=2", "evaluate.every_steps=4",
        "evaluate.test=true", "scheduler=onecycle", "transform.mix={_target_:runner.data.transforms.mixing.Mixup}", "epochs=5",
    ),
}  # fmt: skip
BUDGETS: dict[str, tuple[str, ...]] = {
    "digits": (*_STRONG, "data.placement=disk", ANY_WORKERS),
    "digits, SWA": (*_STRONG, "data.placement=disk", ANY_WORKERS, "swa=0.5", "averaging.lr_factor=0.1"),
    "digits, EMA": (*_STRONG, "data.placement=disk", ANY_WORKERS, "ema=0.99", "scheduler=onecycle", "evaluate.test=true"),
    "mosaics until the last epochs": (
        *_OWN, "experiment=boxes", "model._target_=faults.scenes.Detector", "transform=detection", "transform.close_epochs=2",
        "transform.sample_train.1.p=1", "data.dataset.samples=60", "data.batch_size=4", "evaluate.batch_size=4", ANY_WORKERS,
    ),
    "digits, 2 ranks": (*_STRONG, "data.placement=disk", ANY_WORKERS, "devices=2", "unfreeze_at=2ep", "freeze=[stages.0]"),
}  # fmt: skip
"""Runs that get their length from a budget."""
# Each life of these takes many times as long as one of the others.
SLOW = ("compiled model",)
HARDEST = (
    *_STRONG, "data.placement=disk", "data.num_workers=2", "accumulate=3", "amp=fp16", "grad_clip.norm=1.0", "epochs=2",
    "limit.train_batches=20", "evaluate.every_steps=4", "checkpoint.every_steps=2",
)  # fmt: skip


def known(words: tuple[str, ...]) -> bool:
    """Whether this version of the program has all of these keys."""
    names = [word.lstrip("+~").split("=")[0] for word in words if not word.startswith("--")]
    groups = {path.name for path in _conf().iterdir() if path.is_dir()}
    return all(name in groups or keys.find(Train, name) is not None for name in names)


def _conf() -> Path:
    from runner.config.sources import shipped

    return Path(shipped())


def configurations() -> dict[str, tuple[str, ...]]:
    """The configurations that this version of the program can run."""
    return {name: whole(words) for name, words in CONFIGURATIONS.items() if known(words)}


def whole(words: tuple[str, ...]) -> tuple[str, ...]:
    """A configuration with what all have in common."""
    return (*COMMON, *(() if any(word.startswith("model=") for word in words) else ("model.width=4",)), *words)


def directory(path: Path) -> str:
    """The word that chooses a run's directory."""
    return f"hydra.run.dir={path}"
