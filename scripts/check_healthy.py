"""Every check on trainings with nothing wrong: each warning or failure is a false alarm. The exit status is 1 if there is one.

    python scripts/check_healthy.py
    python scripts/check_healthy.py --architectures resnet50 vit_b_16 --side 64
    python scripts/check_healthy.py --samples 3000 --side 224 --architectures resnet50

With `--architectures`, torchvision models with random weights are checked on a folder of JPEGs, else the trainings of
`tests/lab/healthy.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests" / "lab"
sys.path.insert(0, str(TESTS))
import healthy  # noqa: E402
from photo_folder import make_folder  # noqa: E402


def main() -> int:
    """Run all checks, print what they find, and count it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", help="models of torchvision")
    parser.add_argument("--samples", type=int, default=600, help="JPEGs")
    parser.add_argument("--side", type=int, default=64, help="pixels")
    options = parser.parse_args()
    alarms = 0
    with tempfile.TemporaryDirectory() as scratch:
        calls = {name: (*healthy.WORDS, *words) for name, words in healthy.TRAININGS.items()}
        if options.architectures:
            root = make_folder(Path(scratch) / "photos", options.samples, options.side)
            words = ("data=image_folder", f"data.root={root}", f"data.image_size={options.side}", "model=torchvision")
            calls = {name: (*words, "optimizer.lr=0.001", f"model.name={name}") for name in options.architectures}
        for name, words in calls.items():
            command = [sys.executable, "-m", "runner", "check", "json=true", *words]
            environment = os.environ | {"PYTHONPATH": str(TESTS)}
            done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=scratch, check=False)
            if not done.stdout:
                print(f"{name}: {done.stderr}")
                alarms += 1
                continue
            found = json.loads(done.stdout)
            read = {split: seen["read"] for split, seen in found["seen"].items()}
            print(f"{name}: {found['counts']} in {found['seconds']:.1f} s, read {read}", flush=True)
            for each in found["checks"]:
                if each["status"] in ("warn", "fail"):
                    alarms += 1
                    print(f"    {each['name']} {each['status']} {each['evidence']}")
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
