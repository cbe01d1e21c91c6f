"""Train a ResNet-50 in channels-last mixed precision on images that worker processes make."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet50

FULL = {"batch": 64, "side": 224, "workers": 8}
TINY = {"batch": 2, "side": 32, "workers": 1}


class RandomImages(Dataset):
    """Bytes as a decoder would give them, turned to floats in the worker."""

    def __init__(self, num_images, side):
        self.num_images = num_images
        self.side = side

    def __len__(self):
        return self.num_images

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        shape = (3, self.side, self.side)
        pixels = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        return pixels.float() / 255, index % 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    args = parser.parse_args()

    size = TINY if args.tiny else FULL
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    net = resnet50().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(
        RandomImages(args.steps * size["batch"], size["side"]),
        batch_size=size["batch"],
        num_workers=size["workers"],
        pin_memory=device == "cuda",
    )
    for pixels, labels in loader:
        pixels = pixels.to(device, non_blocking=True, memory_format=torch.channels_last)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(net(pixels), labels.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss after {args.steps} steps: {loss.item():.3f}")


if __name__ == "__main__":
    main()
