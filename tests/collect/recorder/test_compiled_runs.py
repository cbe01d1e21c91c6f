"""What torch.compile does is the same under the recorder, and its kernels have modules by name."""

import shutil

import pytest

pytest.importorskip("torch")
if shutil.which("g++") is None:
    pytest.skip("Inductor needs a C++ compiler", allow_module_level=True)

from kprof.opened import read
from tests.recorded import record, run_bare
from tests.traces import measured

pytestmark = pytest.mark.slow

# No garbage is looked for among what torch and its compiler bring with them.
NET = """
import gc
gc.disable()
import sys, torch
import torch._dynamo
from torch._dynamo.utils import counters
gc.freeze()
gc.enable()
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)
    def forward(self, x):
        return self.down(torch.relu(self.up(x)))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(8, 4)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
torch.manual_seed(0)
net = Net()
"""
TRAIN = """
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(8):
    loss = step(torch.randn(4, 8)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
COUNT = """
seen = ("fxgraph_cache_hit", "fxgraph_cache_miss", "autograd_cache_hit", "autograd_cache_miss")
both = {**counters["inductor"], **counters["aot_autograd"]}
print({name: count for name, count in both.items() if name in seen})
print(dict(counters["stats"]), dict(counters["frames"]), dict(counters["graph_break"]), loss.item())
"""
COMPILE = """
torch._dynamo.config.error_on_recompile = True
step = torch.compile(net, fullgraph=True)
"""
PRODUCTS = ["head", "layers.0.down", "layers.0.up", "layers.1.down", "layers.1.up"]


@pytest.fixture(scope="module", autouse=True)
def _shared_cache(tmp_path_factory):
    """Let all tests of this file share what Inductor compiles of C++ only once."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("inductor")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        yield cache


@pytest.fixture(scope="module")
def cold(tmp_path_factory, _shared_cache):
    """The folder of the first recording, which finds nothing that was compiled before."""
    folder = tmp_path_factory.mktemp("cold")
    assert list(_shared_cache.iterdir()) == []
    assert record(folder, NET + COMPILE + TRAIN + COUNT).result.exit_code == 0
    return folder


def modules_of(folder, phase, operators=("aten::mm", "aten::addmm")):
    """Return the modules that the matrix products of a phase are attributed to, each once."""
    kernels = measured(read([folder / "run.kprof"])).kernels
    is_product = kernels["op"].isin(operators)
    found = kernels[is_product & (kernels["phase"] == phase)]
    return sorted(found["module"].astype(str).unique())


@pytest.mark.slow
def test_products_have_their_modules_when_all_is_compiled_anew(cold):
    assert modules_of(cold, "forward") == modules_of(cold, "backward") == PRODUCTS


@pytest.mark.slow
def test_compiling_makes_the_same_keys_and_graphs_with_and_without_the_recorder(
    cold, tmp_path, capfd
):
    bare = run_bare(cold)
    assert b"'fxgraph_cache_hit': 2" in bare.stdout
    assert b"'autograd_cache_hit': 1" in bare.stdout

    warm = record(tmp_path, NET + COMPILE + TRAIN + COUNT)
    seen = capfd.readouterr()
    assert (seen.out.encode(), seen.err.encode()) == (bare.stdout, bare.stderr)
    assert modules_of(tmp_path, "forward") == modules_of(tmp_path, "backward") == PRODUCTS
    assert any("torch's cache" in caveat for caveat in warm.description["caveats"])


@pytest.mark.slow
@pytest.mark.usefixtures("cold")
def test_code_out_of_inductors_own_cache_has_its_modules_too(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
    record(tmp_path, NET + COMPILE + TRAIN + COUNT)
    assert "'fxgraph_cache_hit': 2" in capfd.readouterr().out
    assert modules_of(tmp_path, "forward") == modules_of(tmp_path, "backward") == PRODUCTS


WAYS = {
    "AsItIs": "net.compile(); step = net",
    "WithoutGraphs": "step = torch.compile(net, mode='max-autotune-no-cudagraphs')",
    "WithGraphs": "step = torch.compile(net, mode='reduce-overhead')",
    "OfAnySize": "step = torch.compile(net, dynamic=True)",
    "OnePart": "net.layers[1] = torch.compile(net.layers[1]); step = net",
    "EachLayer": "for layer in net.layers: layer.compile()\nstep = net",
    "InFunction": "step = torch.compile(lambda x: net(x) * 2)",
    "Residual": "Block.forward = residual; step = torch.compile(net)",
}
RESIDUAL = """
def residual(self, x):
    return x + self.down(torch.relu(self.up(x)))
"""
# Of several models the largest is named first, and has no prefix.
NAMED_FIRST = "WithoutGraphs"
# Each way has models and code of its own: else one would find what another has compiled.
ALL_WAYS = """
import torch
nets, steps = [], []
for name, source in {sources!r}.items():
    own = {{}}
    exec(compile(source, name + ".py", "exec"), own)
    nets.append(own["net"])
    steps.append(own["step"])
net = torch.nn.ModuleList(nets)
def step(x):
    return sum(step(x) for step in steps)
"""


@pytest.fixture(scope="module")
def ways(tmp_path_factory):
    """The folder of a recording of models that are compiled in every way."""
    folder = tmp_path_factory.mktemp("ways")
    sources = {name: NET.replace("Net", name) + RESIDUAL + way for name, way in WAYS.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
        run = record(folder, ALL_WAYS.format(sources=sources) + TRAIN)
    assert run.result.exit_code == 0
    return folder


def products_of(name):
    return [path if name == NAMED_FIRST else f"{name}.{path}" for path in PRODUCTS]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_products_have_their_modules_however_a_model_is_compiled(ways, phase):
    expected = sorted(product for name in WAYS for product in products_of(name))
    assert modules_of(ways, phase) == expected


def test_a_product_that_the_compiler_gave_an_addend_serves_the_products_module(ways):
    found = modules_of(ways, "backward", ["aten::addmm"])
    assert [path for path in found if path.startswith("Residual.")] == ["Residual.layers.1.up"]


@pytest.mark.parametrize("options", ["", ", fullgraph=True"])
def test_code_that_is_compiled_is_counted_without_a_new_counter(tmp_path, options):
    from kprof.collect.launch import RECORDER

    script = f"""
import sys, torch
sys.path.insert(0, {str(RECORDER)!r})
from kprof_recorder.compiler import num_compiled
found = [num_compiled()]
from torch._dynamo.utils import counters
before = sorted(counters)
found.append(num_compiled())
assert sorted(counters) == before
double = torch.compile(lambda x: 2 * x, backend="eager"{options})
for shape in ((2,), (2,), (2, 3)):
    double(torch.ones(shape))
    found.append(num_compiled())
print(found[0], found[1], found[2] > 0, found[3] == found[2], found[4] > found[3])
"""
    (tmp_path / "script.py").write_text(script)
    assert run_bare(tmp_path).stdout.split() == [b"0", b"0", b"True", b"True", b"True"]
