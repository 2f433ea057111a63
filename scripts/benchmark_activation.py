"""What activation checkpointing saves and costs: the same steps with and without it, in alternation.

    python scripts/benchmark_activation.py --models resnet50,vit_b_16 --size 96 --batch 16

For each model of torchvision: bytes that autograd keeps of a batch, median seconds of a training step and of the ratios of
neighbouring steps, and whether gradients and buffers are the same bit for bit.
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
from torch import Tensor, nn

from runner.instrument.saved_tensors import bytes_for_backward
from runner.runtime.activation import checkpoint_activations


def build(name: str, size: int) -> nn.Module:
    """A model of torchvision for 10 classes and images of a size."""
    options = {"image_size": size} if name.startswith("vit") else {}
    model: nn.Module = torchvision.models.get_model(name, num_classes=10, **options)
    return model


def step(
    model: nn.Module, images: Tensor, targets: Tensor, autocast: contextlib.AbstractContextManager[object]
) -> float:
    """Seconds of forward, loss and backward from a fixed seed."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    began = time.perf_counter()
    with autocast:
        loss = nn.functional.cross_entropy(model(images), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    if images.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether gradients and buffers agree in every bit."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    gradients = all(mine.grad is not None and torch.equal(mine.grad, theirs.grad) for mine, theirs in pairs)  # type: ignore[arg-type]
    return gradients and all(map(torch.equal, one.buffers(), other.buffers()))


def compare(name: str, setting: bool | str, options: argparse.Namespace) -> None:
    """Measure a model and print a row."""
    device = torch.device(options.device)
    torch.manual_seed(0)
    plain = build(name, options.size).to(device)
    images = torch.randn(options.batch, 3, options.size, options.size, device=device)
    targets = torch.randint(0, 10, (options.batch,), device=device)
    less = copy.deepcopy(plain)

    def autocast() -> contextlib.AbstractContextManager[object]:
        return torch.autocast(device.type, torch.bfloat16) if options.amp else contextlib.nullcontext()

    done = checkpoint_activations(less, setting, lambda copies: less(images[:copies]), autocast)
    assert done is not None, "activation checkpointing is off"
    with autocast():
        before, after = (
            bytes_for_backward(model, lambda model=model: model(images))  # type: ignore[misc]
            for model in (copy.deepcopy(plain), copy.deepcopy(less))
        )
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(options.repeats + 1):
        pair = [step(model, images, targets, autocast()) for model in (plain, less)]
        for seconds, found in zip(times, pair, strict=True):
            seconds += [found] if number else []  # the first pair warms up
    ratio = statistics.median(slow / fast for fast, slow in zip(*times, strict=True))
    print(
        f"{name:<20} {len(done.names):>6} {before / 2**20:>9.1f} {after / 2**20:>9.1f} "
        f"{1 - after / before:>7.0%} {statistics.median(times[0]):>8.3f} {statistics.median(times[1]):>8.3f} {ratio:>6.2f} "
        f"{'same' if same(plain, less) else 'different'}"
    )


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
    print(f"torch {torch.__version__}, {platform.machine()}, {options.device}, {options.threads} threads, {options}")
    print(f"{'model':<20} {'blocks':>6} {'MiB':>10} {'less':>8} {'saved':>7} {'s':>9} {'less':>7} {'ratio':>6} bits")
    for name in options.models.split(","):
        compare(name, options.setting == "true" or options.setting, options)


if __name__ == "__main__":
    main()
