"""Names that other programs have for keys and options of this one, for messages only: none of them is a key here."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_OF = {
    "optimizer.lr": "learning_rate learningrate lr_rate base_lr init_lr initial_lr max_lr",
    "optimizer.weight_decay": "wd decay l2 l2_reg weightdecay",
    "optimizer": "opt optim optimiser",
    "scheduler": "sched schedule lr_scheduler lr_schedule",
    "loss": "criterion loss_fn loss_function objective",
    "loss.label_smoothing": "smoothing ls",
    "model": "arch architecture net network backbone",
    "data": "dataset",
    "data.batch_size": """bs batch batchsize train_batch_size per_device_train_batch_size per_gpu_batch_size
        minibatch_size batch_size_train""",
    "evaluate.batch_size": "eval_batch_size val_batch_size test_batch_size per_device_eval_batch_size",
    "data.num_workers": "num_workers workers n_workers nworkers num_worker dataloader_num_workers",
    "data.root": "data_dir data_path data_root datadir dataset_path dataset_dir root path dataroot train_dir",
    "data.image_size": "img_size imgsz image_sizes input_size resolution img_dim crop_size",
    "data.download": "fetch",
    "data.split.val": "val_split val_size valid_size validation_split val_fraction val_ratio",
    "data.split.test": "test_split test_size test_fraction test_ratio",
    "data.split.folds": "k_folds kfold n_splits n_folds cv",
    "data.hflip": "flip horizontal_flip",
    "transform": "augment augmentation augmentations aug transforms",
    "epochs": "epoch max_epochs n_epochs num_epochs nepochs total_epochs num_train_epochs ep e",
    "max_steps": "steps step iterations iters max_iter max_iters n_iters num_steps total_steps num_iterations",
    "max_time": "time_limit timeout walltime time",
    "seed": "random_seed manual_seed rng_seed random_state seed_everything",
    "device": "gpu cuda accelerator use_cuda no_cuda cpu gpu_id use_gpu",
    "devices": "gpus num_gpus n_gpus n_gpu ngpu ngpus nproc nproc_per_node world_size num_processes num_devices",
    "strategy": "ddp distributed parallel backend",
    "amp=fp16": "fp16 half",
    "amp=bf16": "bf16 bfloat16",
    "amp": "precision mixed_precision use_amp mixed autocast",
    "compile": "torch_compile jit",
    "ckpt_path": """checkpoint ckpt resume_from resume_from_checkpoint checkpoint_path load load_from restore restore_from
        resume_path weights_path""",
    "checkpoint.every_epochs": "save_every save_freq save_interval save_period checkpoint_every",
    "checkpoint.monitor": "monitor_metric early_stop_metric metric_for_best_model",
    "checkpoint.keep": "save_total_limit save_top_k max_to_keep",
    "init_from": "finetune finetune_from pretrained_path pretrained_model init_checkpoint load_weights",
    "model.weights": "weights pretrained pretrained_weights imagenet use_pretrained",
    "freeze": "freeze_backbone frozen freeze_layers",
    "accumulate": """grad_accum gradient_accumulation_steps accumulate_grad_batches accumulation_steps grad_accumulation
        accum_iter gradient_accumulation""",
    "grad_clip.norm": "clip clip_grad clip_norm max_grad_norm gradient_clip_val gradient_clip grad_norm clip_grad_norm",
    "activation_checkpointing": "gradient_checkpointing grad_checkpointing grad_checkpoint",
    "ema": "ema_decay model_ema use_ema",
    "deterministic": "determinism reproducible",
    "sweep.new": "new_sweep",
    "sweep.dir": "sweep_folder",
    "output_root": "output_dir out_dir outdir output save_dir log_dir logdir save_path results_dir default_root_dir",
    "name": "exp_name run_name experiment_name project run_id exp",
    "log.every_steps": "log_interval log_every log_every_n_steps print_freq logging_steps log_freq",
    "log.progress": "verbose quiet silent progress_bar enable_progress_bar tqdm",
    "evaluate.every_epochs": "eval_every eval_interval eval_freq val_interval val_check_interval check_val_every_n_epoch",
    "evaluate.test": "test do_test run_test",
    "limit.train_batches": "limit_train_batches max_batches",
    "limit.eval_batches": "limit_val_batches limit_test_batches",
    "lr=auto": "lr_find find_lr auto_lr auto_lr_find",
    "data.batch_size=auto": "auto_batch_size auto_scale_batch_size",
    "transform=mix": "mixup cutmix",
    "debug=smoke": "fast_dev_run smoke smoke_test",
    "debug=overfit": "overfit overfit_batches overfit_pct",
    "debug=anomaly": "detect_nan",
    "logger": "tensorboard report_to log_to",
    "logger=wandb": "wandb use_wandb wandb_project",
    "logger=mlflow": "mlflow use_mlflow mlflow_tracking_uri",
    "callbacks=early_stopping callbacks.early_stopping.patience": "patience early_stop early_stopping_patience",
    "callbacks=early_stopping": "early_stopping earlystopping",
    "--config-dir DIR experiment": "config cfg conf config_file yaml hparams",
}
KEYS = {name: key for key, names in _OF.items() for name in names.split()}
"""The key, or the words, that a name of other programs means here."""

_OPTIONS = {
    "model": {"cnn": "small_cnn", "convnet": "small_cnn", "vit": "vit_tiny", "resnet": "resnet18_cifar"},
    "data": dict.fromkeys(("imagenet", "imagefolder", "folder", "custom", "images"), "image_folder data.root=DIR"),
    "loss": {"ce": "cross_entropy", "nll": "cross_entropy", "l2": "mse", "bce_with_logits": "bce"},
    "scheduler": {"none": "constant", "linear": "wsd", "cosine_annealing": "cosine", "one_cycle": "onecycle"},
    "transform": {"augment": "standard", "mixup": "mix", "cutmix": "mix", "autoaugment": "randaugment"},
    "debug": dict.fromkeys(("true", "on", "yes", "1"), "smoke"),
    "logger": dict.fromkeys(("false", "off", "no"), "none"),
    "callbacks": dict.fromkeys(("false", "off", "no"), "none"),
}
_VALUES = {
    "device": {"gpu": "cuda"},
    "amp": {"16": "fp16", "fp32": "false", "32": "false", "float16": "fp16", "bfloat16": "bf16", "half": "fp16"},
    "dtype": {
        "float16": "amp=fp16",
        "bfloat16": "amp=bf16",
        "fp16": "amp=fp16",
        "bf16": "amp=bf16",
        "float": "float32",
    },
    "resume": dict.fromkeys(("true", "yes", "on"), "auto"),
}
_CLASSES = {"optimizer": ("torch.optim", "torch/optim/*.py"), "loss": ("torch.nn", "torch/nn/modules/*.py")}


def plain(word: str) -> str:
    """A name in the spelling of the table: `--Learning-Rate` as `learning_rate`."""
    return word.lstrip("-+~").replace("-", "_").lower()


def key_meant(key: str) -> str:
    """What a dotted key means that other programs have, whole or by its last part; an empty string if nothing is known."""
    word = plain(key)
    return KEYS.get(word) or KEYS.get(word.rpartition(".")[2], "")


def option_meant(group: str, name: str) -> str:
    """The option that a name means which other programs have, maybe with keys after it; an empty string if none is known."""
    word = plain(name)
    if known := _OPTIONS.get(group, {}).get(word):
        return known
    if group == "model" and _defines("torchvision/models/*.py", word):
        return f"torchvision model.name={word}"
    return ""


def target_meant(group: str, name: str) -> str:
    """The words that select a class of torch or of another package, where an option is expected; empty if it is not such a name."""
    if group == "scheduler":
        name = name.removeprefix("torch.optim.lr_scheduler.")
    if "." in name and all(part.isidentifier() for part in name.split(".")) and not name.endswith((".yaml", ".yml")):
        return (
            f"'~{group}' '+{group}._target_={name}'" if group in ("callbacks", "logger") else f"{group}._target_={name}"
        )
    if group == "scheduler" and _defines("torch/optim/lr_scheduler.py", name):
        return f"scheduler=torch scheduler.name={name}"
    module, files = _CLASSES.get(group, ("", ""))
    return f"{group}._target_={module}.{name}" if files and name[:1].isupper() and _defines(files, name) else ""


def value_meant(key: str, value: object) -> str:
    """The value of a key that is meant by one of other programs; an empty string if none is known."""
    text = str(value).lower()
    if key == "resume" and text not in _VALUES["resume"]:
        return f"ckpt_path={value}"
    return _VALUES.get(key, {}).get(text, "")


def _defines(files: str, name: str) -> bool:
    """Tell whether files of an installed package define a class or function; importing torch to see takes seconds."""
    package, _, pattern = files.partition("/")
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    definition = re.compile(rf"^(?:class|def) (?!_){re.escape(name)}\b", re.MULTILINE)
    return any(definition.search(path.read_text()) for each in folders or () for path in Path(each).glob(pattern))
