"""Changes that a resumed run may make: a declaration for every key of the schema."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from runner.base.errors import Problem
from runner.config.keys import within


class Change(Enum):
    """The consequence if the command line gives another value than the checkpoint."""

    REFUSED = "refused"
    """The saved state would mean something else."""
    REFUSED_INSIDE_EPOCH = "refused inside an epoch, reported at its end"
    """The position counts batches of a given order."""
    REPORTED = "allowed and reported"
    """The run ends with other weights, or another choice of the best ones, than without the change."""
    ALLOWED = "allowed"
    """No bit of the weights depends on it."""


_OF = {
    Change.REFUSED: """
        budget model task data.dataset data.image_size data.split.val data.split.test data.split.seed data.split.stratified
        data.split.folds data.split.fold data.split.group init init_from init_mismatch freeze unfreeze_at
        adapters.rank adapters.alpha adapters.dropout adapters.modules adapters.trained
        optimizer._target_ optimizer.no_decay optimizer.lr_mult optimizer.layer_decay
    """,
    Change.REFUSED_INSIDE_EPOCH: """
        seed accumulate data.batch_size data.shuffle data.shuffle_window data.sampler data.batch_sampler data.drop_last
        limit.train_batches
    """,
    Change.REPORTED: """
        epochs max_steps lr optimizer scheduler loss grad_clip.norm grad_clip.value grad_clip.agc
        transform.sample_train transform.sample_eval transform.train transform.eval transform.mix transform.close_epochs data.shift
        data.hflip data.normalize.mean data.normalize.std data.images data.collate data.on_error data.max_pixels data.decode
        device devices strategy dist.find_unused_parameters fsdp.blocks fsdp.replicas threads dtype amp channels_last sync_batchnorm
        compile compiler.mode compiler.fullgraph compiler.dynamic
        cudnn_benchmark tf32 matmul_precision deterministic on_nonfinite
        evaluate.every_epochs evaluate.every_steps limit.eval_batches metrics callbacks checkpoint.monitor checkpoint.mode
        ema swa averaging.warmup averaging.lr_factor averaging.anneal_epochs averaging.recalibrate_batches
    """,
    Change.ALLOWED: """
        name tags notes output_root ckpt_path resume max_time trust logger detect_anomaly activation_checkpointing post_mortem
        json watch.shapes watch.finite data.name data.root data.download data.max_skipped data.placement data.cache
        data.cache_dir data.num_workers data.prefetch data.persistent_workers data.pin_memory data.non_blocking data.timeout_s
        data.identity evaluate.batch_size evaluate.test checkpoint.every_epochs checkpoint.every_steps
        sweep.dir sweep.new sweep.retry sweep.ablate slurm.signal slurm.requeue
        search.sampler search.trials search.pruner search.warmup search.reduction search.seeds search.jobs
        search.storage search.space
        max_restarts dist.timeout_s fsdp.reshard_after_forward dry_run
        checkpoint.min_seconds checkpoint.keep checkpoint.async log.every_steps log.progress log.utilization log.device log.curves
        log.pictures
    """,
}
CHANGES = {key: change for change, keys in _OF.items() for key in keys.split()}


def declared(key: str) -> Change:
    """The declaration for a dotted key or its component; unknown keys of older versions are reported."""
    section, _, name = key.partition(".")
    if section == "optimizer" and f"{section}.{name.partition('.')[2]}" in CHANGES:  # of one of several
        key = f"{section}.{name.partition('.')[2]}"
    while key and key not in CHANGES:
        key = key.rpartition(".")[0]
    return CHANGES.get(key, Change.REPORTED)


def changes_refused(changed: Sequence[str], inside_epoch: bool) -> list[Problem]:
    """Problems of changing these dotted keys when resuming a checkpoint, which may have been written inside an epoch."""
    problems = []
    sections = (key.removesuffix("._target_") for key in changed if key.endswith("._target_"))
    others = [section for section in sections if declared(section) is Change.REFUSED]
    for key in changed:
        if declared(key) is Change.REFUSED:
            # Another component has other arguments, too, which are not separate problems
            if within(key, others) and not key.endswith("._target_"):
                continue
            allowed = "the checkpoint's value, or a new run"
            if key == "model._target_":
                allowed += " without ckpt_path= (init_from= starts one from the weights of another)"
            problems.append(Problem(key, "cannot change when resuming", allowed))
        elif inside_epoch and declared(key) is Change.REFUSED_INSIDE_EPOCH:
            allowed = "the checkpoint's value, or a checkpoint from the end of an epoch"
            problems.append(Problem(key, "cannot change when resuming inside an epoch", allowed))
    return problems


def other_run(key: str) -> bool:
    """Tell whether a run with another value of a key is another one for `resume=auto`, and not the same on other hardware."""
    hardware = ("device", "devices", "strategy", "threads", "dist", "fsdp")
    return key == "data.root" or (changes_result(key) and not within(key, hardware))


def changes_result(key: str) -> bool:
    """Tell whether a key that may change is one that is to be reported."""
    return declared(key) is not Change.ALLOWED
