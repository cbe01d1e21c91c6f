"""Runs when Python starts, as far as the folder is on PYTHONPATH."""

import os

import torch

os.environ["CUSTOMIZED"] = str(torch.ones(2).sum().item())
