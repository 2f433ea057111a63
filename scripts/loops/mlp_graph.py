"""An MLP on digits, whose steps are CUDA graphs: one for whole batches, and one for the smaller last batch of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peers.cases import LOG_EVERY
from peers.work import Work


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """A step as a graph, after some on another stream, which warm up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # threads of `runner` may copy meanwhile
        step()
    return graph


def epochs(work: Work, model: nn.Module) -> Iterator[None]:
    """Train an epoch at a time: one gather an epoch, the rates in the device's memory, the loss read every 50 steps."""
    images, targets, size = work.normalised(work.train.images), work.train.targets, work.case.batch_size
    rates = torch.tensor(work.rates(), device=images.device)
    rate, total = torch.zeros_like(rates[0]), torch.zeros_like(rates[0])
    optimizer = work.sgd(model, fused=True)
    optimizer.param_groups[0]["lr"] = rate  # 0 while warming up, so that no weight changes
    log, step = [], 0

    def graph_of(inputs: Tensor, classes: Tensor) -> torch.cuda.CUDAGraph:
        def train() -> None:
            loss = F.cross_entropy(model(inputs), classes)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            total.add_(loss.detach())

        return captured(train)

    places = {count: (images[:count].clone(), targets[:count].clone()) for count in {size, len(images) % size} - {0}}
    graphs = {count: graph_of(*place) for count, place in places.items()}
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()
    total.zero_()
    for _ in range(work.job.epochs):
        order = torch.randperm(len(images), device=images.device)
        for inputs, classes in zip(images[order].split(size), targets[order].split(size), strict=True):
            place = places[len(inputs)]
            place[0].copy_(inputs)
            place[1].copy_(classes)
            rate.copy_(rates[step])
            graphs[len(inputs)].replay()
            step += 1
            if step % LOG_EVERY == 0:
                log.append(total.item() / LOG_EVERY)
                total.zero_()
        yield
