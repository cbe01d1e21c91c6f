"""Find the largest eigenvalue of a matrix by power iteration.

Neither modules nor an optimizer: without them kprof cannot tell one step from the next, and
records from the start.

Profile it:  kprof run examples/plain_tensors.py
"""

import argparse

import torch


def largest_eigenvalue(matrix, num_iterations):
    """Return the estimate after `num_iterations` products of the matrix with a vector."""
    vector = torch.ones(matrix.shape[0], device=matrix.device)
    for _ in range(num_iterations):
        product = matrix @ vector
        vector = product / product.norm()
    return (vector @ (matrix @ vector)).item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--size", type=int, default=512, help="rows of the matrix")
    args = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    noise = torch.randn(args.size, args.size, device=device)
    # A product with its own transpose has no negative eigenvalue, so the iteration settles.
    estimate = largest_eigenvalue(noise @ noise.T / args.size, args.iterations)
    print(f"largest eigenvalue after {args.iterations} iterations: {estimate:.4f}")


if __name__ == "__main__":
    main()
