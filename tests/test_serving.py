"""The service of the documentation answers as the checkpoint does."""

import contextlib
import http.client
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from PIL import Image
from ports import free_port
from torch import nn

from cnnstrategies import ImageClassifier
from cnnstrategies.data import DigitsDataModule
from cnnstrategies.deploy import export

SCRIPT = ROOT / "docs/examples/serve.py"
BOUNDARY = "a-line-between"


def ask(port, picture):
    """What the service answers, as soon as it does."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n'
    body = head.encode() + picture + f"\r\n--{BOUNDARY}--\r\n".encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    deadline = time.monotonic() + 120
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request("POST", "/predict", body, kind)
            response = connection.getresponse()
            answer = response.read()
            if response.status == 200 or time.monotonic() > deadline:
                return response.status, answer
        assert time.monotonic() < deadline, "no answer"
        time.sleep(0.2)


@pytest.mark.extra
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("litserve", "multipart"))),
    reason="litserve or python-multipart is not installed: pip install '.[serve]'",
)
def test_the_service_of_the_documentation_answers_as_the_checkpoint_does():
    torch.manual_seed(0)
    model, data = ImageClassifier(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 10), DigitsDataModule(batch_size=4)
    export.export(model, data, Path("digits"), "torch_export")
    image = data.val_source.images[:1]
    port = free_port()
    # As it stands there, on a port that is free.
    Path("serve.py").write_text(SCRIPT.read_text().replace("port=8000", f"port={port}"))
    service = subprocess.Popen(
        [sys.executable, "serve.py"], stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        file = io.BytesIO()
        Image.fromarray(image[0, 0].numpy()).save(file, "PNG")
        status, answer = ask(port, file.getvalue())
    finally:
        os.killpg(service.pid, signal.SIGKILL)  # It has processes of its own.
        service.wait(30)
    assert status == 200, answer
    with torch.no_grad():
        expected = model.network(data.eval_transform(image))[0].softmax(0).topk(5)
    found = json.loads(answer)
    assert list(found) == [str(name) for name in expected.indices.tolist()]
    assert list(found.values()) == pytest.approx(expected.values.tolist(), abs=1e-5)
