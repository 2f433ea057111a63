"""What the process that the jobs of a sweep are forked from imports before the first of them."""

import gc

import matplotlib.backends.backend_agg
import matplotlib.figure  # noqa: F401
import torchmetrics.classification  # noqa: F401
from torch.utils import tensorboard  # noqa: F401

from runner.verbs import _job, train  # noqa: F401

gc.freeze()  # a collection in a job would copy the pages of what was imported
