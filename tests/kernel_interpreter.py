"""Triton's interpreter for the tests of kernels; import this before anything that imports Triton.

Where another test of the same process imported Triton for a GPU, these tests are skipped.
"""

import os
import sys

import pytest

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was imported without its interpreter", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
