"""Attention of many queries, as in training and prefill, with its gradients."""
