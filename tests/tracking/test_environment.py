import json
import subprocess
import sys

import torch

from runner.tracking.environment import environment, lines


def test_the_environment_is_json_and_names_versions_hardware_and_command():
    env = environment()
    again = json.loads(json.dumps(env, allow_nan=False))
    assert again == env
    assert env["torch"]["version"] == torch.__version__
    assert env["cpu"]["model"]
    assert env["cpu"]["usable"] >= 1
    assert env["memory_bytes"] > 2**20
    assert len(env["devices"]) == torch.cuda.device_count()
    table = lines(env)
    assert all(isinstance(label, str) and isinstance(value, str) for label, value in table)
    assert {"python", "cpu", "torch", "command"} <= {label for label, _ in table}


def test_devices_and_what_same_bits_need_are_told():
    env = environment()
    table = dict(lines(env))
    for need in (f"torch {torch.__version__}", f"{torch.get_num_threads()} thread", env["torch"]["cpu_capability"]):
        assert need in table["same bits need"]
    env["devices"] = [{"name": "Some GPU", "memory_bytes": 80 * 2**30, "capability": "9.0", "multiprocessors": 1}] * 2
    table = dict(lines(env))
    assert table["cuda:1"] == "Some GPU, 80.0 GiB, capability 9.0"
    assert table["same bits need"].endswith("; Some GPU (9.0); deterministic=true")


def test_passwords_and_keys_on_the_command_line_are_masked_and_other_variables_are_left_out(monkeypatch):
    arguments = ["runner", "train", "logger.x.api_key=abc123", "+my.password=abc123", "optimizer.lr=0.1"]
    monkeypatch.setattr(sys, "orig_argv", arguments)
    monkeypatch.setenv("MY_TOKEN", "abc123")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    env = environment()
    assert "abc123" not in json.dumps(env)
    assert env["command"] == ["runner", "train", "logger.x.api_key=***", "+my.password=***", "optimizer.lr=0.1"]
    assert env["variables"]["OMP_NUM_THREADS"] == "1"


def _git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_commit_is_recorded_with_whether_files_differ_from_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _git(tmp_path, "init", "-q")
    assert environment()["git"] is None
    (tmp_path / "a").write_text("1")
    _git(tmp_path, "add", "a")
    _git(tmp_path, "commit", "-qm", "first")
    clean = environment()["git"]
    (tmp_path / "a").write_text("2")
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    assert environment()["git"] == {"commit": clean["commit"], "dirty": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    env = environment()
    assert env["git"] is None, "there is no git"
    assert lines(env)
