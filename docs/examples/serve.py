"""Serves what `cnnstrategies export --format torch_export --output digits` has written."""

import json
from pathlib import Path

import litserve
import torch
from PIL import Image
from torchvision.transforms import v2


class Classifier(litserve.LitAPI):
    def setup(self, device):
        self.about = json.loads(Path("digits/export.json").read_text())
        self.network = torch.export.load("digits/model.pt2").module().to(device)
        self.mode = "L" if self.about["image_shape"][0] == 1 else "RGB"
        how = self.about["preprocessing"]
        resize = v2.Resize(how["resize_shorter_side"], v2.InterpolationMode(how["interpolation"]))
        resized = [v2.PILToTensor(), resize, v2.CenterCrop(how["crop_centre"])]
        normal = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(how["mean"], how["std"])]
        self.prepare = v2.Compose(resized + normal)

    def predict(self, request):
        image = self.prepare(Image.open(request["image"].file).convert(self.mode)).to(self.device)
        best = self.network(image[None])[0].softmax(0).topk(5)
        probabilities, classes = map(torch.Tensor.tolist, best)
        names = [self.about["class_names"][index] for index in classes]
        return dict(zip(names, probabilities, strict=True))


if __name__ == "__main__":
    litserve.LitServer(Classifier()).run(port=8000, generate_client_file=False)
