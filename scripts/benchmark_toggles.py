"""What activation checkpointing saves and costs, and how long an optimizer's step takes in each of its ways.

    python scripts/benchmark_toggles.py activation --models resnet50,vit_b_16 --size 96 --batch 16
    python scripts/benchmark_toggles.py optimizers --models mobilenet_v3_small,resnet18,resnet50

`activation`: the same steps with and without it, in alternation. For each model of torchvision: bytes that autograd keeps of a
batch, median seconds of a training step and of the ratios of neighbouring steps, and whether gradients and buffers are the same
bit for bit. `optimizers`: one tensor after the other, with foreach, and fused. For each model and each optimizer: median
milliseconds of a step, the three ways in alternation, and the way that the program takes where nothing is set.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import platform
import statistics
import time

import torch
import torchvision
from torch import nn

from runner.instrument.saved_tensors import bytes_for_backward
from runner.optim.kernels import choose_kernels
from runner.runtime.activation import checkpoint_activations

OPTIMIZERS = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 0.001}, "RMSprop": {"lr": 0.001}}
WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def compare(name: str, setting: bool | str, options: argparse.Namespace) -> str:
    """Measure a model; returns its row."""
    torch.manual_seed(0)
    vit = {"image_size": options.size} if name.startswith("vit") else {}
    plain: nn.Module = torchvision.models.get_model(name, num_classes=10, **vit).to(options.device)
    images = torch.randn(options.batch, 3, options.size, options.size, device=options.device)
    targets = torch.randint(0, 10, (options.batch,), device=options.device)
    less = copy.deepcopy(plain)

    def autocast() -> contextlib.AbstractContextManager[object]:
        return torch.autocast(options.device, torch.bfloat16) if options.amp else contextlib.nullcontext()

    def step(model: nn.Module) -> float:
        torch.manual_seed(0)
        model.zero_grad(set_to_none=True)
        began = time.perf_counter()
        with autocast():
            loss = nn.functional.cross_entropy(model(images), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if images.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    checkpoint_activations(less, setting, lambda samples: less(images[:samples]), autocast, warnings=[])
    blocks = sum("forward" in vars(module) for module in less.modules())
    kept = []
    for model in (copy.deepcopy(plain), copy.deepcopy(less)):  # this forward pass changes statistics of BatchNorm
        with autocast():
            kept.append(bytes_for_backward(model, lambda model=model: model(images)) / 2**20)  # type: ignore[misc]
    # The first pair warms up.
    times = [(step(plain), step(less)) for _ in range(options.repeats + 1)][1:]
    pairs = list(zip(plain.parameters(), less.parameters(), strict=True))
    same = all(torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)  # type: ignore[arg-type]
    same = same and all(map(torch.equal, plain.buffers(), less.buffers()))
    fast, slow = (statistics.median(seconds) for seconds in zip(*times, strict=True))
    ratio = statistics.median(after / before for before, after in times)
    cells = [name, f"{blocks}", f"{kept[0]:.1f} MiB", f"{kept[1]:.1f} MiB", f"{1 - kept[1] / kept[0]:.0%}"]
    return " | ".join([*cells, f"{fast:.3f} s", f"{slow:.3f} s", f"{ratio:.2f}", "same" if same else "different"])


def measure(name: str, parameters: list[torch.nn.Parameter], repeats: int) -> dict[str, float]:
    """Median milliseconds of a step by way; ways that the optimizer does not have are skipped."""
    optimizers = {}
    for way, options in WAYS.items():
        if way != "fused" or name != "RMSprop":
            optimizers[way] = getattr(torch.optim, name)(parameters, **OPTIMIZERS[name], **options)
            optimizers[way].step()
    times: dict[str, list[float]] = {way: [] for way in optimizers}
    for _ in range(repeats):
        for way, optimizer in optimizers.items():
            began = time.perf_counter()
            optimizer.step()
            if parameters[0].is_cuda:
                torch.cuda.synchronize()
            times[way].append((time.perf_counter() - began) * 1000)
    return {way: statistics.median(found) for way, found in times.items()}


def show_activation(options: argparse.Namespace) -> None:
    """Measure and print what checkpointing does."""
    print(f"torch {torch.__version__}, {options}\n")
    print("| model | blocks | kept before | after | saved | step before | after | ratio | bits |")
    print("|---" * 9 + "|")
    for name in options.models.split(","):
        print(f"| {compare(name, options.setting == 'true' or options.setting, options)} |", flush=True)


def show_optimizers(options: argparse.Namespace) -> None:
    """Measure and print the steps of optimizers."""
    print(f"torch {torch.__version__}, {platform.machine()}, {options.device}, {options.threads} threads; ms a step")
    print(f"{'model':<20} {'weights':>11} {'optimizer':<9}" + "".join(f"{way:>9}" for way in WAYS) + "  left open")
    for model in options.models.split(","):
        parameters = list(torchvision.models.get_model(model).to(options.device).parameters())
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        weights = sum(parameter.numel() for parameter in parameters)
        for name, arguments in OPTIMIZERS.items():
            found = measure(name, parameters, options.repeats)
            chosen = choose_kernels({"_target_": f"torch.optim.{name}", **arguments}, parameters).name
            row = "".join(f"{found[way]:9.2f}" if way in found else f"{'-':>9}" for way in WAYS)
            print(f"{model:<20} {weights:>11,} {name:<9}{row}  {chosen}")


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["activation", "optimizers"])
    parser.add_argument("--models", default="resnet18,resnet50,vit_b_16")
    parser.add_argument("--setting", default="true", help="of checkpointing: true, or a pattern of module names")
    parser.add_argument("--size", type=int, default=96, help="pixels")
    parser.add_argument("--batch", type=int, default=16, help="samples")
    parser.add_argument("--repeats", type=int, default=15, help="measured steps, or pairs of them")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", action="store_true", help="bf16 autocast")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    (show_activation if options.what == "activation" else show_optimizers)(options)


if __name__ == "__main__":
    main()
