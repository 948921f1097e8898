"""The scripts of the documentation run as their first lines say."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from conftest import ROOT
from torchvision.models import vgg11


def test_pipeline_with_plain_torch():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    script = ROOT / "docs/examples/pipeline_torch.py"
    ended = subprocess.run([*command, str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("loss") == 5
    weights = torch.load(Path("vgg11.pt"), weights_only=True)
    assert weights.keys() == vgg11(num_classes=10).state_dict().keys()
