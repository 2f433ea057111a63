import subprocess
import sys

CODE = """
import sys
from runner.base import files
from runner.run import directory
from runner.tracking import console, environment, loggers, jsonl, plots
from runner.tracking.trackers import loggers
heavy = {"torch", "matplotlib", "tensorboard", "psutil", "torchmetrics", "numpy", "rich", "mlflow", "wandb"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_importing_the_room_imports_no_heavy_library():
    subprocess.run([sys.executable, "-c", CODE], check=True)
