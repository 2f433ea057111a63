import subprocess
import sys


def test_importing_the_room_imports_no_heavy_library():
    code = (
        "import sys\n"
        "from runner.base import files\n"
        "from runner.run import directory\n"
        "from runner.tracking import console, environment, loggers, jsonl, plots\n"
        "heavy = {'torch', 'matplotlib', 'tensorboard', 'psutil', 'torchmetrics', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
