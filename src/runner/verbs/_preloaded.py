"""What the process that the jobs of a sweep are forked from imports, and prepares, before the first of them."""

import gc
import io

import matplotlib.backends.backend_agg
import matplotlib.figure
import torch._dynamo  # noqa: F401  which optimizers import, for a second
from torch.utils import tensorboard  # noqa: F401

from runner.config.schema.train import Train
from runner.config.validate import adapter
from runner.verbs import _launch, train  # noqa: F401

adapter(Train)
figure = matplotlib.figure.Figure()
figure.subplots()
figure.savefig(io.BytesIO())  # loads the font of the labels and the writer of PNG
gc.freeze()  # a collection in a job would copy the pages of what was imported
