"""Folder, arguments, classes and module names in other scripts, in a locale that has none."""

# folder: Größe  数 'x' $HOME
# command: env LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {python} {script} "ä b" "x  y"
# seen: 9

import sys
from pathlib import Path

import torch


class Größe(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.schicht_ä = torch.nn.Linear(4, 4)
        self.add_module('quo"te\\ \n数', torch.nn.Linear(4, 4))
        torch.nn.init.ones_(self.schicht_ä.weight)

    def forward(self, x):
        return self._modules['quo"te\\ \n数'](self.schicht_ä(x))


torch.manual_seed(0)
model = Größe().eval()
for _ in range(9):
    out = model(torch.ones(2, 4))
Path("out.txt").write_text(str(out.tolist()))
print(ascii(sys.argv[1:]), ascii(Path.cwd().name))
