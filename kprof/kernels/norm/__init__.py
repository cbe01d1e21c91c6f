"""Norms of rows: RMSNorm and LayerNorm, with or without a residual add."""
