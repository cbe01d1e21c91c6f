"""Decode attention beside torch's own and the installed peers', on one GPU, in one run.

python benchmarks/decode_attention.py [--seconds 100]

GPU time is that of a CUDA graph's replay over caches that L2 cannot hold, of 32 query heads and 8
heads of keys of 128 columns, and of one query token unless a row says of how many; a share of read
is a share of the rate at which torch adds up 4 GiB in the same process. Every provider's result is
compared with one in float32. Peers that are not installed are missing, and so is what they do not
do; `problem` says why.
"""

import argparse
import datetime
import functools
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from evidence import RESULTS, row, write_evidence
from torch.nn import functional

from kprof.kernels.bench.choice import versions_of
from kprof.kernels.decode_attention.decode_attention import KERNEL, decode_attention
from kprof.timing import captured, time_on_gpu

SOURCES = (
    "benchmarks/decode_attention.py",
    *("kprof/kernels/decode_attention/decode_attention.py", "kprof/timing.py", "kprof/timing.py"),
)
QUERY_HEADS, HEADS, DIM, PAGE = 32, 8, 128, 64
SHORT, LONG = (1_024, 4_096, 16_384), (131_072, 262_144)
OURS = "kprof"
# What is not right is not measured: relative L2 error; a peer rounds queries and weights to e4m3.
MOST_ERROR = 0.05
FP8 = torch.float8_e4m3fn
READ_BYTES = 4 << 30
SHORTEST_SAMPLE_NS = 2e6


@dataclass(frozen=True)
class Call:
    """One call: sequences, keys of each, how the cache lies, and new tokens of each sequence."""

    batch: int
    keys: int
    is_paged: bool = False
    is_fp8: bool = False
    tokens: int = 1

    @property
    def name(self):
        """Return what rows are called by."""
        how = ("-paged" if self.is_paged else "") + ("-fp8" if self.is_fp8 else "")
        how += f"-{self.tokens}tokens" if self.tokens > 1 else ""
        return f"{self.batch}x{self.keys}{how}"

    @property
    def num_bytes(self):
        """Return the least that has to be read: the cache."""
        return 2 * self.batch * self.keys * HEADS * DIM * (1 if self.is_fp8 else 2)


PLAIN = (
    *(Call(1, keys) for keys in SHORT + LONG),
    *(Call(batch, 4_096) for batch in (8, 32)),
    *(Call(128, 2_048), Call(256, 1_024)),
)
CALLS = (
    *PLAIN,
    *(Call(1, keys, is_fp8=True) for keys in (*SHORT, LONG[0])),
    Call(32, 4_096, is_fp8=True),
    *(Call(1, keys, is_paged=True) for keys in (4_096, 16_384, LONG[0])),
    Call(32, 4_096, is_paged=True),
    Call(32, 4_096, is_paged=True, is_fp8=True),
    *(Call(1, keys, tokens=4) for keys in (4_096, 16_384)),
    Call(32, 4_096, tokens=4),
)


def main():
    """Measure all calls, as long as there is time, the most telling first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit", default=None, help="commit of a tree that is no checkout")
    args = parser.parse_args()
    ends_s = time.monotonic() + args.seconds
    month = datetime.datetime.now(tz=datetime.timezone.utc).strftime("%Y-%m")
    path = args.out / f"decode_attention_h200_{month}.json"
    read = rate_of_reading()
    rows = [row("read", read, "B/s", "higher"), *rows_of_host()]
    versions = versions_of(KERNEL.providers)
    for call in CALLS:
        if time.monotonic() > ends_s:
            rows.append(row(call.name, None, "of read", "higher", problem="out of time"))
            continue
        rows += rows_of(call, measured(call), read)
        write_evidence(
            path, "decode_attention", rows, SOURCES, commit=args.commit, versions=versions
        )
    write_evidence(path, "decode_attention", rows, SOURCES, commit=args.commit, versions=versions)


def rate_of_reading():
    """Return at what rate a large array is added up, in B/s."""
    source = torch.ones(READ_BYTES // 4, device="cuda")
    return READ_BYTES / time_on_gpu(source.sum, sample_ns=2e7).median_ns * 1e9


def rows_of_host():
    """Return what a call without gradients takes the host, of ours and of torch's."""
    q, k, v = sets_of(Call(1, 1_024), 1)[0]
    calls = {OURS: decode_attention, "sdpa": sdpa(Call(1, 1_024))}
    rows = []
    for name, call in calls.items():
        with torch.no_grad():
            # What repeats a call is compiled when it comes again.
            for _ in range(20):
                call(q, k, v)
            torch.cuda.synchronize()
            began_ns = time.perf_counter_ns()
            for _ in range(200):
                call(q, k, v)
            took_ns = (time.perf_counter_ns() - began_ns) / 200
        torch.cuda.synchronize()
        rows.append(row(f"host-{name}", took_ns, "ns", "lower"))
    return rows


def sets_of(call, most=48):
    """Return as many sets of queries, keys and values as L2 cannot hold."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    num_sets = min(most, max(2, -(-4 * l2_bytes // call.num_bytes)))
    shapes = (call.batch, QUERY_HEADS, call.tokens, DIM), *2 * [(call.batch, HEADS, call.keys, DIM)]
    made = []
    for _ in range(num_sets):
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        made.append((q, k.to(FP8), v.to(FP8)) if call.is_fp8 else (q, k, v))
    return made


def in_pages(cache):
    """Return a cache as (pages, heads, PAGE, D), the pages of a sequence one after another."""
    batch, heads, keys, dim = cache.shape
    pages = cache.view(batch, heads, keys // PAGE, PAGE, dim).transpose(1, 2)
    return pages.reshape(-1, heads, PAGE, dim)


def measured(call):
    """Return GPU time or problem of every provider."""
    sets = sets_of(call)
    expected = in_float32(*sets[0])
    found = {}
    for name, make in providers_of(call).items():
        try:
            run, given = make(call, sets)
            found[name] = gpu_ns_of(run, given, expected), ""
        except ImportError as error:
            found[name] = None, f"not installed: {error}"
        except (RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError) as error:
            found[name] = None, f"{type(error).__name__}: {str(error)[:200]}"
        torch.cuda.empty_cache()
    return found


def gpu_ns_of(run, given, expected):
    """Return the time of a call in the replay of a graph; what is not right has none."""
    with torch.no_grad():
        y = run(*given[0])
        y = (y[0] if isinstance(y, tuple) else y).reshape(expected.shape).float()
        error = float((y - expected).norm() / expected.norm())
        if not error < MOST_ERROR:
            raise ValueError(f"wrong: relative error {error:.2g}")
        calls = max(len(given), 16)
        turn = iter(range(10**9))
        work = captured(lambda: run(*given[next(turn) % len(given)]), calls)
        took = time_on_gpu(work, sample_ns=SHORTEST_SAMPLE_NS, warm_up_s=0.1)
    return took.median_ns / calls


def in_float32(q, k, v):
    """Return the attention of the first set, a sequence at a time; the last token sees all keys."""
    tokens, results = q.shape[2], []
    is_hidden = ~seen_by_last(tokens, k.shape[2], q.device)
    for q_of_one, k_of_one, v_of_one in zip(q, k, v, strict=True):
        q_of_heads = q_of_one.float().view(HEADS, -1, tokens, DIM)
        scores = q_of_heads @ k_of_one.float().mT[:, None] / math.sqrt(DIM)
        weights = torch.softmax(scores.masked_fill(is_hidden, -math.inf), -1)
        results.append(weights @ v_of_one.float()[:, None])
    return torch.stack(results).view(q.shape)


def seen_by_last(tokens, keys, device):
    """Return which keys the last tokens of a sequence see, (tokens, keys)."""
    return torch.ones(tokens, keys, dtype=torch.bool, device=device).tril(keys - tokens)


def providers_of(call):
    """Return who does this, each as a function that prepares its calls."""
    ours = {OURS: ours_of, f"{OURS}-invariant": functools.partial(ours_of, is_invariant=True)}
    torchs = {} if call.is_paged or call.is_fp8 else {"sdpa": sdpa_of}
    return ours | torchs | {"flash-attn-3": flash_3_of, "flashinfer": flashinfer_of}


def ours_of(call, sets, **options):
    """Prepare this repository's kernel."""
    if not call.is_paged:
        return functools.partial(decode_attention, **options), sets
    table = torch.arange(call.batch * call.keys // PAGE, device="cuda", dtype=torch.int32)
    lengths = torch.full((call.batch,), call.keys, device="cuda", dtype=torch.int32)
    more = {"lengths": lengths, "table": table.view(call.batch, -1), **options}
    given = [(q, in_pages(k), in_pages(v)) for q, k, v in sets]
    return functools.partial(decode_attention, **more), given


def sdpa(call):
    """Return torch's own, with a mask where there are several tokens: it lets all see all."""
    mask = None if call.tokens == 1 else seen_by_last(call.tokens, call.keys, "cuda")
    options = {"enable_gqa": True, "attn_mask": mask}
    return functools.partial(functional.scaled_dot_product_attention, **options)


def sdpa_of(call, sets):
    """Prepare torch's own: the fastest of its ways as it chooses itself."""
    return sdpa(call), sets


def flash_3_of(call, sets):
    """Prepare FlashAttention-3, which takes the query in e4m3 with such a cache."""
    from fa3_fwd_interface import flash_attn_with_kvcache

    lengths = torch.full((call.batch,), call.keys, device="cuda", dtype=torch.int32)
    options = {"cache_seqlens": lengths, "causal": True}
    if call.is_paged:
        table = torch.arange(call.batch * call.keys // PAGE, device="cuda", dtype=torch.int32)
        options["page_table"] = table.view(call.batch, -1)
        sets = [(q, in_pages(k), in_pages(v)) for q, k, v in sets]
    given = [tuple(one.transpose(1, 2).contiguous() for one in each) for each in sets]
    if call.is_fp8:
        given = [(q.to(FP8), k, v) for q, k, v in given]

    def run(*tensors):
        y = flash_attn_with_kvcache(*tensors, **options)
        return (y[0] if isinstance(y, tuple) else y).transpose(1, 2)

    return run, given


def flashinfer_of(call, sets):
    """Prepare FlashInfer: one token of one sequence at once, more in pages by a plan."""
    import flashinfer

    if call.batch == 1 and call.tokens == 1 and not call.is_paged:
        options = {"kv_layout": "HND", "use_tensor_cores": True}
        run = functools.partial(flashinfer.single_decode_with_kv_cache, **options)
        return run, [(q[0, :, 0], k[0], v[0]) for q, k, v in sets]
    int32 = {"dtype": torch.int32, "device": "cuda"}
    pages = call.keys // PAGE
    first = torch.arange(call.batch + 1, **int32) * pages
    index, last = (
        torch.arange(call.batch * pages, **int32),
        torch.full((call.batch,), PAGE, **int32),
    )
    space = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        *(space, "HND"),
        use_cuda_graph=True,
        use_tensor_cores=True,
        paged_kv_indptr_buffer=first,
        paged_kv_indices_buffer=index,
        paged_kv_last_page_len_buffer=last,
    )
    options = {"q_data_type": sets[0][0].dtype, "kv_data_type": sets[0][1].dtype}
    options["q_len_per_req"] = call.tokens
    heads = (QUERY_HEADS, HEADS, DIM, PAGE)
    wrapper.plan(first.clone(), index.clone(), last.clone(), *heads, **options)
    # Tokens first, which costs nothing where there is one.
    given = [(q.transpose(1, 2).flatten(0, 1), (in_pages(k), in_pages(v))) for q, k, v in sets]

    def run(*tensors):
        y = wrapper.run(*tensors)
        return y.unflatten(0, (call.batch, call.tokens)).transpose(1, 2)

    return run, given


def rows_of(call, found, read):
    """Return the rows of one call, and print a line."""
    share = {
        name: None if gpu_ns is None else call.num_bytes / gpu_ns * 1e9 / read
        for name, (gpu_ns, _) in found.items()
    }
    rows = []
    for name, (gpu_ns, problem) in found.items():
        is_ours = name == OURS
        reach = 0.92 if is_ours and call in (Call(1, LONG[0]), Call(32, 4_096)) else None
        about = {"gpu_ns": gpu_ns, "problem": problem}
        what = call.name if is_ours else f"{call.name}-{name}"
        rows.append(row(what, share[name], "of read", "higher", reach, **about))
    peers = {name: one for name, (one, _) in found.items() if one and not name.startswith(OURS)}
    ours_ns, best = found[OURS][0], min(peers, key=peers.get, default=None)
    if ours_ns and best:
        reach = 1.3 if call.batch == 1 and call.keys in SHORT and call in PLAIN else 1.0
        ratio = peers[best] / ours_ns
        rows.append(row(f"{call.name}-to-best", ratio, "x", "higher", reach, peer=best))
    shown = (f"{n} {t / 1e3:.2f}" if t else f"{n} - ({p[:60]})" for n, (t, p) in found.items())
    print(f"{call.name:16} {share[OURS] or 0:6.3f} of read; us: {', '.join(shown)}", flush=True)
    return rows


if __name__ == "__main__":
    main()
