"""Train a small convolutional net on images from a DataLoader.

Profile it:  kprof run examples/train_convnet.py --workers 2
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class RandomImages(Dataset):
    """Images made on the host when asked for, as a decoder would."""

    def __init__(self, num_images, side):
        self.num_images = num_images
        self.side = side

    def __len__(self):
        return self.num_images

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, self.side, self.side, generator=generator), index % 10


def build_net(width):
    """Return three stages of convolution, norm and pooling before a classifier."""
    stages = []
    for entering, leaving in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        stages += [
            nn.Conv2d(entering, leaving, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(leaving),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--side", type=int, default=32, help="height and width of an image")
    parser.add_argument("--width", type=int, default=16, help="channels of the first stage")
    parser.add_argument("--workers", type=int, default=0, help="processes that make the images")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    net = build_net(args.width).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    images = RandomImages(args.steps * args.batch, args.side)
    loader = DataLoader(images, args.batch, num_workers=args.workers, pin_memory=device == "cuda")
    for pixels, labels in loader:
        pixels = pixels.to(device, non_blocking=True, memory_format=torch.channels_last)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = F.cross_entropy(net(pixels), labels.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss after {args.steps} steps: {loss.item():.3f}")


if __name__ == "__main__":
    main()
