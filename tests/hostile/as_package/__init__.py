"""A package that says which modules it finds imported."""

import sys

print("torch" in sys.modules, sys.argv)
