"""`summary.txt`, which a person opens first: what a run was, what came out, and the commands that continue from it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.base.secrets import mask_text, mask_words
from runner.config.keys import OF_THE_SWEEP, key_of, within
from runner.tracking.formats import duration, metric


def summary_text(folder: Path, summary: Mapping[str, Any], overrides: Sequence[str], saved: bool) -> str:
    """The text for a run that has ended.

    Args:
        folder: the run directory.
        summary: the content of `summary.json`.
        overrides: of the command line.
        saved: whether there is a checkpoint.
    """
    words = [word for word in mask_words(list(overrides)) if not within(key_of(word), OF_THE_SWEEP)]
    again = shlex.join(["python", "-m", "runner", "train", *words])
    lines = [f"{summary.get('status')}, {summary.get('global_step', 0)} steps, {duration(summary.get('wall_s'))}"]
    if summary.get("error"):
        lines += ["", *str(summary["error"]).splitlines()]
    lines += [
        "",
        f"started    {str(summary.get('started', '-')).partition('.')[0].replace('T', ' ')} UTC",
        f"command    {again}",
    ]
    for name in ("resumed_from", "tags", "notes"):
        if summary.get(name):
            lines.append(f"{name.replace('_', ' '):<11}{summary[name]}")
    if best := summary.get("best"):
        lines.append(f"best       {metric(best['metric'], best['value'])} at step {best['global_step']}")
    for name in ("last", "test"):
        if values := summary.get(name):
            lines.append(f"{name:<11}" + ", ".join(metric(each, value) for each, value in values.items()))
    if saved:
        given = shlex.quote(f"ckpt_path={folder}")
        lines += ["", "from here on"]
        commands = {
            "resume": f"train {given}" + (" epochs=MORE" if summary.get("status") == "finished" else ""),
            "evaluate": f"eval {given} split=test",
            "predict": f"predict {given} input=FOLDER",
            "export": f"export {given} format=torch_export",
        }
        lines += [f"  {name:<9}python -m runner {command}" for name, command in commands.items()]
    lines += ["", "run.log has what the terminal showed, config.yaml all settings, metrics.jsonl the curves,"]
    lines += ["environment.json the versions and the hardware, checkpoints/ the weights."]
    return mask_text("\n".join(lines) + "\n")
