"""Candidates of `--swap auto`: whose turn it is, and what the log says of each."""

import json
import os

import pytest
import torch
from torch import nn

from kprof.errors import KprofError
from kprof.kernels.swap import candidates, swapping
from kprof.kernels.swap.candidates import candidate_names, next_candidate
from kprof.kernels.swap.kept import facts_of, keep_choice, words_of
from kprof.kernels.swap.swap_report import FIRST_LOOK, GATE_PASSED, Choice, Tried
from kprof.kernels.swap.swapping import swapped
from tests.kernels.swap_models import Mlp, Norm


def events(log):
    return [(one["event"], one["name"]) for one in map(json.loads, log.read_text().splitlines())]


@pytest.fixture(autouse=True)
def roots(monkeypatch):
    """Return the models of this process: those that a test names, and none of earlier tests."""
    found = []
    monkeypatch.setattr(swapping, "all_roots", lambda: found)
    return found


def plan(log, *left, base=""):
    log.with_suffix(".plan").write_text(json.dumps({"left": left, "base": base}))


def turn(names, log, model):
    swapping.all_roots()[:] = [model]
    with next_candidate(" ".join(names), str(log)):
        model(torch.ones(2, 16))


def test_each_candidate_has_its_turn_and_one_that_replaces_no_call_none_after_it(tmp_path):
    log, model = tmp_path / "log", nn.Sequential(Norm(16), nn.LayerNorm(16))
    names = ["rmsnorm=eager", "swiglu=eager", "layernorm=aten"]
    for _ in range(3):
        turn(names, log, model)
    assert [one for one in events(log) if one[0] != "leave"] == [
        ("enter", "rmsnorm=eager"),
        ("enter", "swiglu=eager"),
        ("drop", "swiglu=eager"),
        ("enter", "layernorm=aten"),
        ("enter", "rmsnorm=eager"),
    ]
    calls = [one.get("num_calls") for one in map(json.loads, log.read_text().splitlines())]
    assert calls == [None, 1, None, None, None, 1, None, 2]


def test_the_base_is_in_wherever_no_candidate_is(tmp_path):
    log, model = tmp_path / "log", nn.Sequential(Norm(16), nn.LayerNorm(16))
    joint, norm = "rmsnorm=eager,layernorm=aten", "rmsnorm=eager"

    def swapped_in():
        return tuple("forward" in vars(one) for one in model)

    turn([joint], log, model)
    assert swapped_in() == (False, False)
    plan(log, norm, base=joint)
    swapping.all_roots()[:] = [model]
    with next_candidate(joint, str(log)):
        assert swapped_in() == (True, False)
        model(torch.ones(2, 16))
    assert swapped_in() == (True, True)
    # Where none is left as well.
    plan(log, base=joint)
    with next_candidate(joint, str(log)):
        assert swapped_in() == (True, True)
    plan(log)
    with next_candidate(joint, str(log)):
        pass
    assert swapped_in() == (False, False)
    assert [one["base"] for one in lines(log) if one["event"] == "enter"] == ["", joint]


def test_a_joint_swap_says_how_each_kernel_ran_and_why_others_did_not(tmp_path):
    log, model = tmp_path / "log", nn.Sequential(Norm(16), nn.LayerNorm(16))
    turn(["swiglu=eager,rmsnorm=eager,layernorm=aten"], log, model)
    (left,) = [one for one in lines(log) if one["event"] == "leave"]
    assert {name: one["provider"] for name, one in left["ran"].items()} == {
        "rmsnorm": "eager",
        "layernorm": "aten",
    }
    assert [one["num_calls"] for one in left["ran"].values()] == [1, 1]
    assert set(left["whys"]) == {"swiglu"}


def test_a_joint_swap_with_a_provider_is_about_that_kernel(tmp_path):
    log, model = tmp_path / "log", nn.Sequential(Norm(16))
    turn(["rmsnorm,layernorm=aten"], log, model)
    assert events(log)[-1] == ("drop", "rmsnorm,layernorm=aten")


def test_a_candidate_beside_a_base_is_about_the_kernel_that_it_adds(tmp_path):
    log, model = tmp_path / "log", nn.Sequential(Norm(16))
    turn(["rmsnorm=eager,layernorm=aten"], log, model)
    assert events(log)[-1] == ("drop", "rmsnorm=eager,layernorm=aten")


def test_a_candidate_that_is_decided_has_no_more_turns(tmp_path):
    log, model = tmp_path / "log", nn.Sequential(Norm(16), nn.LayerNorm(16))
    for _ in range(3):
        turn(["rmsnorm=eager", "layernorm=aten"], log, model)
        plan(log, "layernorm=aten")
    assert [one[1] for one in events(log) if one[0] == "enter"] == [
        "rmsnorm=eager",
        *["layernorm=aten"] * 2,
    ]
    plan(log)
    turn(["rmsnorm=eager", "layernorm=aten"], log, model)
    assert len(events(log)) == 6


def test_two_candidates_take_turns_until_both_may_be_judged(tmp_path):
    """Else none has enough windows where steps are long."""
    log, model = tmp_path / "log", nn.Sequential(Norm(16), nn.LayerNorm(16))
    names = ["rmsnorm=eager", "layernorm=aten", "rmsnorm=aten"]
    both = 2 * (1 + FIRST_LOOK)
    for _ in range(both + 2):
        turn(names, log, model)
    entered = [one[1] for one in events(log) if one[0] == "enter"]
    # The first entry of each is not timed.
    assert entered[:both] == names[:2] * (1 + FIRST_LOOK)
    assert set(entered[both:]) == {names[2]}


def test_behind_each_turn_the_model_is_as_it_was(tmp_path):
    model = nn.Sequential(Norm(16))
    for _ in range(2):
        turn(["rmsnorm=eager"], tmp_path / "log", model)
        with swapped(model, "rmsnorm=eager") as swap:
            assert len(swap.replaced) == 1
    assert "forward" not in vars(model[0])


def test_an_error_of_the_workload_leaves_the_candidate(tmp_path, roots):
    model = nn.Sequential(Norm(16))
    roots.append(model)
    with pytest.raises(ZeroDivisionError), next_candidate("rmsnorm=eager", str(tmp_path / "log")):
        raise ZeroDivisionError
    assert "forward" not in vars(model[0])


def test_with_no_candidate_left_the_workload_runs_as_it_is(tmp_path):
    for _ in range(2):
        turn(["swiglu=eager"], tmp_path / "log", nn.Sequential(Norm(16)))
    assert events(tmp_path / "log") == [("enter", "swiglu=eager"), ("drop", "swiglu=eager")]


def lines(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_the_first_entry_records_the_calls_and_later_ones_have_no_look_at_results(
    tmp_path, monkeypatch
):
    log, model = tmp_path / "log", nn.Sequential(Norm(16))
    seen = []
    monkeypatch.setattr(candidates, "are_numbers", lambda values: seen.append(1) or True)
    for _ in range(3):
        turn(["rmsnorm=eager"], log, model)
    assert len(seen) == 2
    first, *others = [one for one in lines(log) if one["event"] == "leave"]
    (sort,) = first["ran"]["rmsnorm"]["sorts"]
    assert (sort["shape"], sort["dtype"], sort["has_gradients"]) == ([2, 16], "float32", True)
    assert ["ran" in one for one in others] == [False, False]
    assert [one["num_calls"] for one in (first, *others)] == [1, 2, 3]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_candidate_whose_results_are_no_numbers_is_dropped_at_once(tmp_path, monkeypatch, value):
    from kprof.kernels.swap.providers import Providers

    chosen = Providers.choose

    def spoiling(self, kernel, x, *others, **options):
        # Not on the rows on which a site tries the kernel first.
        if x.shape[0] == 2 and x.dim() == 2:
            return lambda x, *rest: torch.full_like(x, value), "eager", None
        return chosen(self, kernel, x, *others, **options)

    monkeypatch.setattr(Providers, "choose", spoiling)
    turn(["swiglu=eager"], tmp_path / "log", Mlp(16))
    last = lines(tmp_path / "log")[-1]
    assert (last["event"], last["is_spoilt"], last["kernel"]) == ("drop", True, "swiglu")


def test_a_candidate_under_which_weights_become_no_numbers_is_dropped_at_once(tmp_path):
    log, model = tmp_path / "log", nn.Sequential(Norm(16))
    swapping.all_roots()[:] = [model]
    with next_candidate("rmsnorm=eager", str(log)):
        model(torch.ones(2, 16))
        with torch.no_grad():
            model[0].weight[3] = float("nan")
    assert (lines(log)[-1]["event"], lines(log)[-1]["is_spoilt"]) == ("drop", True)


def test_weights_that_were_no_numbers_before_are_no_candidates_fault(tmp_path):
    log, model = tmp_path / "log", nn.Sequential(Norm(16))
    with torch.no_grad():
        model[0].weight[3] = float("inf")
    turn(["rmsnorm=eager"], log, model)
    assert events(log) == [("enter", "rmsnorm=eager"), ("leave", "rmsnorm=eager")]


def test_other_ranks_swap_in_what_rank_0_swapped_in_at_the_same_entry(tmp_path, monkeypatch):
    """Whatever is decided meanwhile: two ranks may come to a step at different times."""
    log, names = tmp_path / "log", ["swiglu=eager", "rmsnorm=eager", "layernorm=aten"]
    models = [nn.Sequential(Norm(16), nn.LayerNorm(16)) for _ in range(2)]
    monkeypatch.setenv("WORLD_SIZE", "2")

    def entered(rank):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setattr(candidates, "_of_logs", runs[rank])
        model = swapping.all_roots()[:] = [models[rank]]
        with next_candidate(" ".join(names), str(log)):
            (model,) = model
            model(torch.ones(2, 16))
            return tuple("forward" in vars(one) for one in model)

    runs = {}, {}
    found = []
    for _ in range(4):
        first = entered(0)
        # It is decided between the entries of the two ranks.
        plan(log, *names[:1], *names[2 - (len(found) < 2) :])
        found.append((first, entered(1)))
    assert [one for one, _ in found] == [(True, False), (False, True), (True, False), (False, True)]
    assert all(one == other for one, other in found)
    # Rank 0 alone writes the log.
    assert [one for one in events(log) if one[0] == "enter"] == [
        ("enter", name) for name in (names[0], names[1], names[2], names[1], names[2])
    ]


def test_a_rank_that_waits_in_vain_for_rank_0_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(candidates, "PATIENCE_S", 0.01)
    with pytest.raises(TimeoutError), next_candidate("rmsnorm=eager", str(tmp_path / "log")):
        pass


def test_candidates_keep_the_precision_and_repeat_their_bits():
    names = candidate_names()
    assert {"rmsnorm=kprof", "cross_entropy=kprof", "layernorm=aten"} <= set(names)
    assert not {"fp8_linear=kprof", "attention_fp8=kprof"} & set(names)
    assert "attention_forward=kprof-hopper-unordered" not in names
    assert not [one for one in names if one.endswith(("=eager", "=inductor"))]


def test_auto_takes_the_kernels_that_were_chosen_for_the_script(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.setattr("sys.argv", [str(script), "--fast"])
    with pytest.raises(KprofError) as error:
        swapped(nn.Sequential(Norm(16)), "auto")
    assert "kprof run --swap auto" in error.value.fix
    words = words_of(("torchrun", "--nproc-per-node", "2", str(script), "--fast"))
    one = Tried("rmsnorm=eager", ratio=0.9, low=0.8, high=0.95, gate=GATE_PASSED)
    keep_choice(facts_of(words, os.environ), Choice((one, Tried("layernorm=aten", why="no call"))))
    model = nn.Sequential(Norm(16), nn.LayerNorm(16))
    with swapped(model, "auto") as swap:
        model(torch.ones(2, 16))
    assert [site.kernel for site in swap.replaced] == ["rmsnorm"]
    # Where kprof tries kernels on the script, or swaps them in itself, this swaps none.
    for name, value in (("KPROF_SCHEDULE", "schedule.json"), ("KPROF_SWAP", "")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with swapped(model, "auto") as swap:
                model(torch.ones(2, 16))
            assert swap.sites == ()
    with pytest.raises(KprofError):
        swapped(model, "auto", "rope")


def test_a_module_is_known_by_its_file(tmp_path, monkeypatch):
    (tmp_path / "training.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    words = words_of(("python", "-m", "training", "--fast"))
    assert words == [str(tmp_path / "training.py"), "--fast"]


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("work.inner.train", "work/inner/train.py"),
        ("work.own", "work/own/__main__.py"),
        ("space.deeper.train", "space/deeper/train.py"),
    ],
)
def test_a_module_is_found_without_running_its_packages(tmp_path, monkeypatch, module, file):
    for name in ("work", "work/inner", "work/own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit(3)")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("raise SystemExit(4)")
    monkeypatch.chdir(tmp_path)
    assert words_of(("python", "-m", module, "-x")) == [str(tmp_path / file), "-x"]
    for other in ("work.none", "..work", "work.", "none"):
        assert words_of(("python", "-m", other)) == ["python", "-m", other]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("python", "-m", "launching.run", "--nproc", "2", "train.py", "-x"), ("train.py", "-x")),
        (("python", "-m", "launching.run", "-m", "mine", "-x"), ("{}/mine.py", "-x")),
        (("torchrun", "--module", "mine"), ("{}/mine.py",)),
        # Without a script of the user, the module is the script.
        (("python", "-m", "launching.run", "-x"), ("{}/site-packages/launching/run.py", "-x")),
        (("python", "train.py", "-m", "mine"), ("train.py", "-m", "mine")),
    ],
)
def test_behind_a_launcher_the_script_is_the_users(tmp_path, monkeypatch, words, wanted):
    installed = tmp_path / "site-packages" / "launching"
    installed.mkdir(parents=True)
    for path in (installed / "run.py", tmp_path / "train.py", tmp_path / "mine.py"):
        path.write_text("")
    monkeypatch.syspath_prepend(str(installed.parent))
    monkeypatch.chdir(tmp_path)
    assert words_of(words) == [one.format(tmp_path) for one in wanted]
