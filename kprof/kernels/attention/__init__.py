"""Attention of many queries, as in training, with its gradients."""
