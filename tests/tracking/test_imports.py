import subprocess
import sys


def test_importing_the_room_imports_no_heavy_library():
    code = (
        "import sys\n"
        "from runner.tracking import console, environment, files, loggers, jsonl, plots, run_directory\n"
        "heavy = {'torch', 'matplotlib', 'tensorboard', 'psutil', 'torchmetrics', 'numpy', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
