"""How long an optimizer's step takes one tensor after the other, with foreach, and fused.

    python scripts/benchmark_optimizers.py --models mobilenet_v3_small,resnet18,resnet50

For each model of torchvision and each optimizer: median milliseconds of a step, the three ways in alternation, and the way
that the program takes where nothing is set.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import torch
import torchvision

from runner.optim.kernels import choose_kernels

OPTIMIZERS = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 0.001}, "RMSprop": {"lr": 0.001}}
WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def measure(name: str, parameters: list[torch.nn.Parameter], repeats: int) -> dict[str, float]:
    """Median milliseconds of a step by way; ways that the optimizer does not have are skipped."""
    optimizers = {}
    for way, options in WAYS.items():
        if way == "fused" and name == "RMSprop":
            continue
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mobilenet_v3_small,resnet18,resnet50")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
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


if __name__ == "__main__":
    main()
