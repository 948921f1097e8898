"""Run an exported network in a program that cannot import the training packages: `loads_elsewhere.py FOLDER`.

Besides the export, the folder contains images and the logits that the checkpoint's network computes for them. An ONNX
export is run without torch, too.
"""

import json
import sys
from pathlib import Path

BARRED = (
    *("cnnstrategies", "lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"),
    *("torchmetrics", "jsonargparse", "omegaconf", "torchao"),
)


class Barred:
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is not to be imported here")


def bar(names):
    sys.meta_path.insert(0, Barred(names))
    for name in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[name]  # A program that starts warm has imported them already.


def logits(folder, description, images):
    if description["format"] == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(folder / description["file"], providers=["CPUExecutionProvider"])
        return session.run(None, {"images": images})[0]
    import torch

    module = torch.export.load(folder / description["file"]).module()
    with torch.no_grad():
        return module(torch.from_numpy(images)).numpy()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    description = json.loads((folder / "export.json").read_text())
    bar((*BARRED, "torch") if description["format"] == "onnx" else BARRED)
    import numpy as np

    results = logits(folder, description, np.load(folder / "images.npy"))
    np.testing.assert_allclose(results, np.load(folder / "logits.npy"), atol=1e-5)
    print(f"{len(results)} images, without {', '.join(name for name in BARRED if name not in sys.modules)}")
