"""The command line: what users type, and what they get when it is wrong."""

import json
import subprocess
import sys
import types

import pandas as pd
import pytest
import typer
from typer.main import get_command

from kprof.__main__ import main
from kprof.cli import COMMANDS, add_command, app, run_command_line
from kprof.collect.sources import readers
from kprof.commands import Answer
from kprof.errors import KprofError
from kprof.storage import own_version

EVENT = {
    "ph": "X",
    "cat": "kernel",
    "name": "gemm",
    "pid": 0,
    "tid": 7,
    "ts": 1.5,
    "dur": 2.25,
    "args": {"device": 0, "stream": 7, "correlation": 1},
}


def kprof(*words):
    """Run one command in this process; return its exit code."""
    with pytest.raises(SystemExit) as stopped:
        run_command_line([str(word) for word in words])
    return stopped.value.code


def test_the_list_of_commands_says_of_each_in_full_what_it_does(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert kprof("--help") == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


HELP_OF_EACH = """
import sys
from kprof.__main__ import main
from kprof.cli import COMMANDS, run_command_line
codes = set()
for name in COMMANDS:
    try:
        run_command_line([name, "--help"])
    except SystemExit as end:
        codes.add(end.code)
heavy = {"jinja2", "numpy", "pandas", "plotly", "pyarrow", "scipy", "torch", "triton"}
print(codes, sorted(heavy & sys.modules.keys()))
"""


def test_the_help_of_a_command_imports_no_tables_figures_or_kernels():
    done = subprocess.run([sys.executable, "-c", HELP_OF_EACH], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "{0} []"


@pytest.fixture
def trace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [EVENT]}))
    return path


@pytest.mark.parametrize("command", [[], ["run"], ["open"]])
def test_a_help_lists_options_of_kprof_alone(command, capsys):
    with pytest.raises(SystemExit):
        run_command_line([*command, "--help"])
    assert "completion" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("opne", "the nearest: open; kprof --help lists all"),
        ("quantum", "see kprof --help"),
        ("train.py", "to record a script: kprof run train.py"),
    ],
)
def test_an_unknown_command_names_the_nearest(name, fix, capfd):
    with pytest.raises(SystemExit) as left:
        run_command_line([name, "trace.json"])
    assert left.value.code == 2
    told = f"kprof: there is no command {name}\n  what to do: {fix}\n"
    assert capfd.readouterr().err == told


def test_open_writes_a_run_folder_beside_you(trace, tmp_path):
    assert kprof("open", trace) == 0
    names = {path.name for path in (tmp_path / "trace.kprof").iterdir()}
    tables = {f"{name}.parquet" for name in ("kernels", "ranges", "samples", "idle")}
    kept = {"meta.json", "findings.json", "summary.json", "terminal.json", "report.html"}
    assert names == tables | kept


def test_json_goes_to_stdout_alone_and_balances(trace, capfdbinary):
    kprof("open", trace, "--json")
    ledger = json.loads(capfdbinary.readouterr().out)["ledger"]
    assert ledger["gpu_sum_ns"] == 2250
    assert ledger["attributed_ns"] + ledger["unattributed_ns"] == ledger["gpu_sum_ns"]
    assert ledger["window_ns"] == ledger["gpu_busy_union_ns"] + ledger["idle_ns"]


def test_a_saved_run_opens_again_without_its_trace(trace, tmp_path, capfdbinary):
    kprof("open", trace)
    trace.unlink()
    capfdbinary.readouterr()
    assert kprof("open", tmp_path / "trace.kprof", "--json") == 0
    assert json.loads(capfdbinary.readouterr().out)["ledger"]["gpu_sum_ns"] == 2250


@pytest.mark.parametrize("version", [own_version(), "0.0.1"])
def test_the_json_of_a_saved_run_is_what_it_keeps_unless_of_another_version(
    trace, tmp_path, capfdbinary, version
):
    kprof("open", trace)
    kept = tmp_path / "trace.kprof" / "summary.json"
    result = json.loads(kept.read_bytes())
    noted = {**result, "noted": True}
    kept.write_text(json.dumps(noted))
    meta = tmp_path / "trace.kprof" / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "kprof": version}))
    capfdbinary.readouterr()
    assert kprof("open", tmp_path / "trace.kprof", "--json") == 0
    printed = json.loads(capfdbinary.readouterr().out)
    assert printed == (noted if version == own_version() else result)


def shown_by(capfdbinary, run):
    assert kprof("open", run) == 0
    return capfdbinary.readouterr().out


def test_a_saved_run_shows_the_same_from_its_tables_and_from_what_it_keeps(
    trace, tmp_path, capfdbinary
):
    first = shown_by(capfdbinary, trace)
    run = tmp_path / "trace.kprof"
    assert shown_by(capfdbinary, run) == first
    (run / "terminal.json").unlink()
    assert shown_by(capfdbinary, run) == first


def _of_another_version(run):
    kept = json.loads((run / "terminal.json").read_bytes())
    (run / "terminal.json").write_text(json.dumps(kept | {"kprof": "0.0.1"}))


def _with_other_bytes(run):
    table = pd.read_parquet(run / "kernels.parquet")
    table.to_parquet(run / "kernels.parquet", compression="zstd")


@pytest.mark.parametrize(
    ("change", "is_kept"),
    [
        (lambda run: None, True),
        (_of_another_version, False),
        (_with_other_bytes, False),
        (
            lambda run: (run / "meta.json").write_bytes((run / "meta.json").read_bytes() + b" "),
            False,
        ),
        (lambda run: (run / "further.json").write_text("{}"), False),
        (lambda run: (run / "report.html").unlink(), False),
    ],
    ids=["nothing", "version", "table", "meta", "further file", "no report"],
)
def test_a_saved_run_shows_what_it_keeps_only_of_the_same_files_and_version(
    trace, tmp_path, capfdbinary, change, is_kept
):
    first = shown_by(capfdbinary, trace)
    run = tmp_path / "trace.kprof"
    kept = run / "terminal.json"
    kept.write_text(json.dumps(json.loads(kept.read_bytes()) | {"title": "noted"}))
    change(run)
    shown = shown_by(capfdbinary, run)
    assert (b"noted" in shown) == is_kept
    assert is_kept or shown == first


def test_an_existing_run_is_not_overwritten_without_force(trace, capfd):
    kprof("open", trace)
    assert kprof("open", trace) == 2
    assert "--force" in capfd.readouterr().err
    assert kprof("open", trace, "--force") == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"[]", "no"),
        (b"{}", "no"),
        (b'{"traceEvents": []}', "no"),
        (b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "no"),
        (b'{"traceEvents": [{"name": "a "quoted" name"}]}', "no"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel"', "JSON"),
        (b"\x89PNG\r\n\x1a\n", "not JSON"),
        (b'[{"frame": {"name": "ROOT"}, "metrics": {}, "children": []}]', "Proton"),
    ],
    ids=[
        "empty file",
        "empty list",
        "empty object",
        "no events",
        "only metadata",
        "unescaped quotes",
        "truncated JSON",
        "a picture",
        "a Proton profile",
    ],
)
def test_a_bad_file_is_one_clear_error_with_the_fix(content, said, tmp_path, capfd):
    bad = tmp_path / "bad.json"
    bad.write_bytes(content)
    assert kprof("open", bad) == 2
    err = capfd.readouterr().err
    assert "what to do:" in err
    assert "Traceback" not in err
    assert said in err
    assert not (tmp_path / "bad.kprof").exists()


def test_a_file_of_no_known_format_names_what_each_reader_opens(tmp_path, capfd):
    other = tmp_path / "notes.txt"
    other.write_text("a list of things to do")
    assert kprof("open", other) == 2
    said = capfd.readouterr().err
    # kprof's own recordings are folders.
    missing = {one.__name__ for one in readers() if getattr(one, "OPENS", "?") not in said}
    assert missing == {"kprof.collect.readers.recorded.reader"}


def test_a_path_that_does_not_exist_is_an_error(tmp_path, capfd):
    assert kprof("open", tmp_path / "nowhere.json") == 2
    assert str(tmp_path / "nowhere.json") in capfd.readouterr().err


def test_a_folder_of_rank_traces_becomes_one_run(tmp_path, monkeypatch, capfdbinary):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ranks").mkdir()
    for rank in (0, 1):
        content = {"distributedInfo": {"rank": rank}, "traceEvents": [EVENT]}
        (tmp_path / "ranks" / f"r{rank}.json").write_text(json.dumps(content))
    assert kprof("open", "ranks", "--json") == 0
    result = json.loads(capfdbinary.readouterr().out)
    assert (result["num_ranks"], result["ledger"]["gpu_sum_ns"]) == (2, 4500)


NEEDED = {
    "run": ("train.py",),
    "open": ("trace.json",),
    "diff": ("a", "b"),
    "whatif": ("a",),
    "ncu": ("a",),
    "ab": ("train.py",),
    "sla": ("result",),
    "fit": ("config.json",),
    "report": ("a",),
    "engage": ("status", "folder"),
    "gate": ("a",),
}
# Options of a number, of a day, and of one of several words.
TYPED = {"N", "S", "X", "SHARE", "DATE", "LEVEL"}
# Words of the parser's own and of the checker's.
INTERNAL = ("Value error", "Input should", "Expected `", "Traceback", "Usage:")


def options_of(command):
    listed = get_command(app).get_command(None, command).params
    return [
        one for one in listed if one.param_type_name == "option" and not one.is_flag and one.opts
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_refuses_wrong_values_with_its_name_and_a_fix(command, tmp_path, capfd):
    """An empty value of each; of numbers, days and choices a word and a negative number."""
    for option in options_of(command):
        name = max(option.opts, key=len)
        values = [] if name == "--arg" else [""]
        values += ["abc", "-1"] if option.metavar in TYPED and name != "--seed" else []
        for value in values:
            given = (name, *[value] * option.nargs)
            assert kprof(command, *given, *NEEDED.get(command, ())) == 2, (command, given)
            said = capfd.readouterr().err
            assert name in said, said
            assert "what to do: " in said
            assert [one for one in INTERNAL if one in said] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("open", "--output", "x", "trace"), "--out"),
        (("open",), "PATH"),
        (("diff", "a"), "B"),
        (("--bogus",), "--bogus"),
        (("run", "--seconds", "inf", "train.py"), "--seconds inf"),
        (("diff", "a", ""), "B is empty"),
    ],
)
def test_a_wrong_command_line_is_answered_with_what_is_wrong_and_a_fix(words, said, capfd):
    assert kprof(*words) == 2
    message = capfd.readouterr().err
    assert said in message
    assert "what to do: " in message


@pytest.mark.parametrize("option", ["--lr", "-x", "--skp=3"])
def test_an_unknown_option_says_where_a_scripts_options_stand(option, capfd):
    assert kprof("run", option, "3", "train.py") == 2
    err = capfd.readouterr().err
    assert option in err
    assert "script" in err


def test_a_missing_script_exits_with_two(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert kprof("run", "nowhere.py") == 2
    assert "kprof: nowhere.py: " in capfd.readouterr().err


def app_with(answer):
    """Return a command line whose one command gives this answer."""
    return app_of(lambda: answer)


def app_of(ask):
    module = types.ModuleType("kprof.commands.ask")
    module.ask = ask
    add_command(app := typer.Typer(), module)
    return app


def interrupted():
    raise KeyboardInterrupt


def test_an_answer_that_cannot_be_written_is_an_error(monkeypatch):
    monkeypatch.setattr("kprof.report.terminal.print_summary", full_disk)
    with pytest.raises(KprofError, match="No space left"):
        app_with(Answer("title", []))([])


def test_the_exit_code_of_a_workload_stands_whether_or_not_its_answer_could_be_written(monkeypatch):
    monkeypatch.setattr("kprof.report.terminal.print_summary", full_disk)
    with pytest.raises(SystemExit) as stopped:
        app_with(Answer("title", [], exit_code=7, if_unwritten=None))([])
    assert stopped.value.code == 7


def test_a_fault_of_kprof_has_a_traceback_and_is_no_answer(monkeypatch, capsys):
    def faulty(*arguments, **options):
        raise ZeroDivisionError

    monkeypatch.setattr("kprof.cli.app", faulty)
    with pytest.raises(SystemExit) as stopped:
        run_command_line(["cost"])
    assert stopped.value.code == 70
    assert "ZeroDivisionError" in capsys.readouterr().err


def full_disk(*arguments):
    raise OSError(28, "No space left on device")


def test_ctrl_c_says_one_line_and_exits_as_shells_expect(capsys):
    with pytest.raises(SystemExit) as stopped:
        app_of(interrupted)([])
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "kprof: interrupted\n"


def test_ctrl_c_before_the_command_does_the_same(monkeypatch, capsys):
    monkeypatch.setattr("kprof.cli.run_command_line", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 130
    assert capsys.readouterr().err == "kprof: interrupted\n"
