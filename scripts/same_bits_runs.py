"""The runs that `scripts/same_bits.py` compares: together they use every optimizer, schedule, transform and loss."""

from __future__ import annotations

COMMON = (
    "device=cpu threads=1 logger=none log.progress=false log.curves=false log.every_steps=5 epochs=2 "
    "checkpoint.min_seconds=0"
)
_STRONG = "transform=strong data.shift=0.125 model.dropout=0.2"
_WORKERS = "data.placement=disk data.num_workers=2"
_COLOUR = "data=synthetic data.dataset.samples=400 data.image_size=16 data.batch_size=20 data.hflip=0.5"
_PICTURES = "data=image_folder data.root={here}/../pictures data.image_size=16 data.batch_size=4"
_BOXES = (
    "data=coco model=torchvision_detection task=detection loss=none optimizer=sgd optimizer.lr=0.01 data.images=['0'] "
    "evaluate.batch_size=8 data.root={here}/../objects data.dataset.train_images=images/train "
    "data.dataset.train_annotations=train.json data.dataset.val_images=images/val data.dataset.val_annotations=val.json "
    "model.name=fasterrcnn_mobilenet_v3_large_320_fpn model.options={min_size:32,max_size:40} data.batch_size=4"
)
_CACHED = f"{_PICTURES} data.cache=disk data.cache_dir={{here}}/cache"
_NAN = "transform.train=[{_target_:poison.Poison,sample:300}] trust=[poison]"  # in tests/support
RUN, _AGAIN = "hydra.run.dir={here}/run", "ckpt_path={here}/run hydra.run.dir={here}/run"
_SWEEP = f"--multirun seed=0,1,2 hydra.sweep.dir={{here}}/sweep {_STRONG} checkpoint.every_steps=1"
KILLED = "killed sweep"
KILL_AT = "sweep/1/checkpoints/step_*"  # of its second job
SHORT: dict[str, tuple[str, ...]] = {
    "adamw, onecycle": (
        "model=mlp optimizer=adamw scheduler=onecycle model.dropout=0.2 optimizer.amsgrad=true optimizer.no_decay=auto",
    ),
    "sgd, plateau, strong": (f"optimizer=sgd scheduler=plateau scheduler.patience=0 {_STRONG} evaluate.every_steps=5",),
    "adam, cosine, mix, smoothing": (
        f"{_COLOUR} optimizer=adam scheduler=cosine scheduler.warmup=5 transform=mix loss.label_smoothing=0.1",
    ),
    "muon, wsd, accumulation, clipping": (
        "model=mlp optimizer=muon scheduler=wsd transform=none accumulate=3 grad_clip.norm=1.0 grad_clip.value=0.1",
    ),
    "airbench, whiten, muon of kernels": (
        f"{_COLOUR} data.image_size=20 model=airbench model.widths=[8,12,16] init=whiten freeze=[whiten.weight] optimizer=muon "
        "optimizer.kernels=true optimizer.normalize=true optimizer.lr=0.1 channels_last=true",
    ),
    "bf16, channels_last": (f"amp=bf16 channels_last=true {_STRONG}",),
    "swa, freeze, init": (
        "swa=0.5 averaging.lr_factor=0.5 freeze=[stages.0] unfreeze_at=1ep init=orthogonal epochs=3",
    ),
    "constant, agc, ema, folds": (
        f"scheduler=constant scheduler.warmup=3 grad_clip.agc=0.02 ema=0.99 data.split.folds=3 data.split.fold=1 {_STRONG}",
    ),
    "resume, workers, ema": (
        f"{_STRONG} {_WORKERS} ema=0.9 accumulate=3 scheduler=plateau {RUN} epochs=3 max_steps=9",
        "ckpt_path={here}/run hydra.run.dir={here}/on epochs=3 max_steps=null data.num_workers=1",
    ),
    "cache": (_CACHED, f"{_CACHED} model=mlp hydra.run.dir={{here}}/cached"),
    "ddp": (f"devices=2 strategy=ddp {_STRONG} sync_batchnorm=true epochs=1",),
    KILLED: (_SWEEP, _SWEEP),
}
"""Runs by name: the commands of each, one after the other. The first command of the killed sweep is killed."""
RUNS: dict[str, tuple[str, ...]] = SHORT | {
    "rmsprop, step, resized_crop, focal": (
        f"{_COLOUR} optimizer=rmsprop optimizer.momentum=0.9 scheduler=step scheduler.every=1 transform=resized_crop "
        "loss=focal",
    ),
    "torch, trivialaugment, scaled lr": (
        f"{_COLOUR} scheduler=torch scheduler.name=StepLR scheduler.options={{step_size:1}} transform=trivialaugment "
        "optimizer.lr_base_batch_size=128 optimizer.lr_mult={head:10}",
    ),
    "randaugment": (f"{_COLOUR} transform=randaugment",),
    "augmix, workers": (f"{_COLOUR} {_WORKERS} transform=augmix",),
    "photos, worker": (f"{_PICTURES} transform=photos data.placement=disk data.num_workers=1",),
    "segmentation, workers": (
        "experiment=segmentation model=torchvision_segmentation transform=segmentation data.root={here}/../shapes "
        "data.image_size=32 data.batch_size=4 data.num_workers=2",
    ),
    "segmentation, dice": (
        "experiment=segmentation model=torchvision_segmentation transform=segmentation data.root={here}/../shapes "
        "data.image_size=32 data.batch_size=4 data.num_workers=2 loss=smp",
    ),
    "detection": (f"{_BOXES} transform=detection_ssd data.num_workers=0 epochs=1",),
    "mosaic, workers": (f"{_BOXES} transform=detection transform.close_epochs=1 data.num_workers=2 epochs=2",),
    "l-bfgs": ("model=mlp optimizer=lbfgs optimizer.max_iter=2 optimizer.lr=0.1 epochs=1",),
    "fp16, non-finite step skipped": (f"amp=fp16 on_nonfinite=skip grad_clip.value=0.5 {_NAN}",),
    "non-finite step skipped": (f"optimizer=sgd optimizer.lr=0.05 on_nonfinite=skip checkpoint.every_steps=2 {_NAN}",),
    "several init, float64, strict": ("loss=bce init=[xavier,prior_bias] dtype=float64 reproducibility=strict",),
    "regression, mse": (f"{_COLOUR} data.dataset.kind=regression data.dataset.classes=1 task=regression loss=mse",),
    "bce, early stopping": ("loss=bce callbacks=early_stopping callbacks.early_stopping.patience=1 epochs=3",),
    "vit, layer decay, checkpointing": (
        "model=vit_tiny model.dim=24 model.depth=2 model.drop_path=0.1 optimizer.layer_decay=0.7 "
        "activation_checkpointing=true epochs=1",
    ),
    "resnet18": (f"{_COLOUR} model=resnet18_cifar model.width=4 limit.train_batches=5",),
    "standard, no persistent workers": (
        f"{_WORKERS} transform=standard data.shift=0.125 data.persistent_workers=false data.prefetch=1",
    ),
    "balanced sampler": (f"data.sampler=balanced data.drop_last=true loss.class_weights=balanced {_STRONG}",),
    "lr": ("model=mlp lr=0.02 epochs=1",),
    "init_from": (f"{RUN} epochs=1", "init_from={here}/run freeze=all-but-head hydra.run.dir={here}/tuned epochs=1"),
    "overfit": ("debug=overfit epochs=20",),
    "resume in the same folder": (f"{_STRONG} {RUN} epochs=3 max_steps=27", f"{_AGAIN} epochs=3 max_steps=45"),
    "resume of swa": (f"swa=0.4 {RUN} epochs=4 max_steps=50", f"{_AGAIN} epochs=4 max_steps=null"),
    "fsdp": (
        f"devices=2 strategy=fsdp model=mlp model.dropout=0.2 accumulate=2 grad_clip.norm=0.5 ema=0.9 {RUN} max_steps=7",
        f"devices=2 strategy=fsdp {_AGAIN} max_steps=15",
    ),
    "fsdp, resumed by one process": (
        f"devices=2 strategy=fsdp {RUN} max_steps=7",
        f"devices=1 strategy=auto {_AGAIN} max_steps=12",
    ),
    "sweep of folds, pool": ("sweep=folds model=mlp hydra.sweep.dir={here}/sweep epochs=1 hydra/launcher=pool",),
    "search": (
        "sweep=optuna model=mlp search.optimizer.lr={log:[1e-4,1e-1]} search.trials=3 hydra.sweep.dir={here}/sweep epochs=1",
    ),
    "ablation": ("sweep=ablate ema=0.9 grad_clip.norm=1.0 hydra.sweep.dir={here}/sweep epochs=1",),
    "compiled": ("compile=model model=mlp data.drop_last=true epochs=1",),
}
