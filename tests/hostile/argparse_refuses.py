"""argparse says on stderr what it does not like, and ends the script before torch is imported."""

# exits: 2
# ranks: none
# says: ended with code 2 before it ran torch

import argparse

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.parse_args()

import torch  # noqa: F401
