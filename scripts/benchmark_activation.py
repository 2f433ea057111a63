"""What activation checkpointing saves and costs: the same steps with and without it, in alternation.

    python scripts/benchmark_activation.py --models resnet50,vit_b_16 --size 96 --batch 16

For each model of torchvision: bytes that autograd keeps of a batch, median seconds of a training step and of the ratios of
neighbouring steps, and whether gradients and buffers are the same bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import time

import torch
import torchvision
from torch import nn

from runner.instrument.saved_tensors import bytes_for_backward
from runner.runtime.activation import checkpoint_activations


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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50,vit_b_16")
    parser.add_argument("--setting", default="true", help="true, or a pattern of module names")
    parser.add_argument("--size", type=int, default=96, help="pixels")
    parser.add_argument("--batch", type=int, default=16, help="samples")
    parser.add_argument("--repeats", type=int, default=7, help="measured pairs of steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--amp", action="store_true", help="bf16 autocast")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options}\n")
    print("| model | blocks | kept before | after | saved | step before | after | ratio | bits |")
    print("|---" * 9 + "|")
    for name in options.models.split(","):
        print(f"| {compare(name, options.setting == 'true' or options.setting, options)} |", flush=True)


if __name__ == "__main__":
    main()
