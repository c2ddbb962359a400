"""From an array of bytes to a tensor."""

import torch
import torch.nn.functional as F


class Compose:
    def __init__(self, parts):
        self.parts = parts

    def __call__(self, image):
        for part in self.parts:
            image = part(image)
        return image


class Resize:
    def __init__(self, size):
        self.size = size

    def __call__(self, image):
        pixels = torch.from_numpy(image.copy())[None, None].float()
        return F.interpolate(pixels, size=(self.size, self.size))[0, 0].numpy()


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(image.copy())[None].float() / 255


class Normalize:
    def __init__(self, mean, deviation):
        self.mean, self.deviation = mean[0], deviation[0]

    def __call__(self, image):
        return (image - self.mean) / self.deviation
