"""`generate` of a causal language model of Hugging Face, with few fused kernels for each token.

`generate` prepares a call as the model does and replaces the loop that decodes; a call that is not
supported runs the loop of the model. `Decoding` has the engines of one model.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules import module as _GLOBAL

from kprof.errors import KprofError
from kprof.kernels import OURS, Kernel, Provider, Shape, Work
from kprof.kernels.decode._engine import (
    GREEDY,
    MOST_STOPS,
    STEPS_OF_GRAPH,
    Engine,
    Sampling,
    launch_linear,
    launch_options,
    launches_early,
    tiling_of,
)
from kprof.kernels.decode._model import DTYPES, MOST_BATCH, Decoder, Weight
from kprof.kernels.runtime import IS_INTERPRETED, num_sms

if TYPE_CHECKING:
    from kprof.kernels.correctness.inputs import Draw

# Seconds between two looks at the tokens, and without a new one until that is an error.
POLL_S = 20e-6
PATIENCE_S = 30.0
# Of the logits of one token, kernels against the model: relative error that is not rounding.
MOST_ERROR = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
# Arguments of `generate` with which the model's own runs.
UNKNOWN_ARGUMENTS = (
    *("position_ids", "past_key_values", "inputs_embeds", "custom_generate"),
    *("assistant_model", "prompt_lookup_num_tokens", "prefix_allowed_tokens_fn"),
)
# Settings with which the model decodes by another loop, or returns more than tokens.
OTHER_LOOPS = (
    *("num_beams", "prompt_lookup_num_tokens", "penalty_alpha", "dola_layers"),
    *("return_dict_in_generate", "token_healing", "assistant_early_exit"),
)
# Logits processors by name, in the order of `generate`, and what they set in a `Sampling`.
PROCESSORS = {
    "TemperatureLogitsWarper": ("temperature", "temperature"),
    "TopKLogitsWarper": ("top_k", "top_k"),
    "TopPLogitsWarper": ("top_p", "top_p"),
}
# Criteria that the GPU tests, or that follow from the number of tokens, and those for the host.
GPU_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")
HOST_CRITERIA = ("StopStringCriteria", "MaxTimeCriteria")

Note = Callable[[str], None]


class Decoding:
    """The decoding of one model: its engines, and why they cannot run."""

    def __init__(self, decoder: Decoder) -> None:
        """Decode with these weights where they are now."""
        self.decoder = decoder
        self.problem = _why_no_device(decoder)
        self._state = self._state_now()
        self._engines: dict[int, Engine] = {}
        self._lost: list[Engine] = []
        self._is_checked = False
        self.lock = threading.Lock()
        """Held while a call decodes: an engine has one cache."""

    def engine(self, batch: int, length: int) -> Engine:
        """Return the engine for a batch, whose cache has room for `length` tokens."""
        engine = self._engines.get(batch)
        if engine is not None and engine.is_lost:
            # Its kernels may still write its memory.
            self._lost.append(self._engines.pop(batch))
            engine = None
        if engine is None or engine.length < length:
            # Frees the smaller cache first.
            engine = None
            self._engines.pop(batch, None)
            # Tensors of inference mode could not be written to by a later call outside of it.
            with torch.inference_mode(False):
                engine = self._engines[batch] = Engine(self.decoder, batch, length)
        return engine

    def is_current(self) -> bool:
        """Return whether weights are where they were, which graphs read, and rotations the same."""
        return self._state == self._state_now()

    def _state_now(self) -> list[object]:
        rotary = self.decoder.rotary
        versions = [(one.data_ptr(), _version_of(one)) for one in rotary.buffers()]
        numbers = [one for one in vars(rotary).values() if isinstance(one, int | float)]
        return [*(one.data_ptr() for one in self.decoder.weights()), *versions, *numbers]

    def why_wrong(self, model: Any) -> str | None:
        """Compare the logits of one token with the model's, once; return why they differ."""
        if self._is_checked or self.problem is not None:
            return self.problem
        decoder = self.decoder
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(decoder.vocabulary, (1, 9), generator=generator)
        tokens = tokens.to(decoder.device)
        with torch.no_grad():
            expected = model(input_ids=tokens, use_cache=False).logits[0, -1].float()
        engine = self.engine(1, tokens.shape[1])
        devices = [decoder.device] if engine.is_cuda else []
        # The sample is not used, and random numbers are the caller's.
        with torch.random.fork_rng(devices), engine.on_stream():
            engine.begin(tokens, None, [], 0)
            engine.step(Sampling(is_sampled=True))
        engine.wait()
        error = (engine.logits[0] - expected).norm() / expected.norm()
        if not error <= MOST_ERROR[decoder.dtype]:
            self.problem = f"its logits differ by {error:.2g} from those of the kernels"
        # Last: a check that was interrupted is done again.
        self._is_checked = True
        return self.problem


def _version_of(tensor: Tensor) -> int:
    # Tensors of inference mode have no version.
    return 0 if tensor.is_inference() else tensor._version


def _why_no_device(decoder: Decoder) -> str | None:
    if decoder.device.type == "cuda" or IS_INTERPRETED:
        return None
    return f"it is on {decoder.device}, not on a GPU"


def generate(
    model: Any,
    original: Callable[..., Any],
    decoding: Decoding,
    note: Note,
    *args: Any,
    is_dry: bool = False,
    **kwargs: Any,
) -> Any:
    """Run `model.generate` with the kernels where they support the call.

    Args:
        model: A causal language model.
        original: Its `generate`, bound.
        decoding: The engines for the model.
        note: Called once: with why the model's own loop runs; empty if the kernels run.
        args: Of `generate`.
        is_dry: The model's own loop runs in any case, and no kernel.
        kwargs: Of `generate`.
    """
    why = _why_not_now(model) or _why_not_arguments(model, args, kwargs)
    if why is None and not decoding.lock.acquire(blocking=False):
        why = "another call decodes at the same time"
    if why is not None:
        note(why)
        return original(*args, **kwargs)
    try:
        return _generate(model, original, decoding, note, args, kwargs, is_dry=is_dry)
    finally:
        decoding.lock.release()


def _generate(
    model: Any,
    original: Callable[..., Any],
    decoding: Decoding,
    note: Note,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_dry: bool,
) -> Any:
    why = decoding.problem if is_dry else decoding.why_wrong(model)
    if why is not None:
        note(why)
        return original(*args, **kwargs)
    # Neither reaches a loop that is given.
    streamer, tokenizer = kwargs.get("streamer"), kwargs.pop("tokenizer", None)
    strings = kwargs.pop("stop_strings", None)
    if strings is not None:
        kwargs["stopping_criteria"] = _with_strings(
            kwargs.get("stopping_criteria"), tokenizer, strings
        )

    def loop(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **others: Any,
    ) -> Any:
        given = (logits_processor, stopping_criteria, generation_config)
        asked = _asked(input_ids, *given, others)
        note(asked if isinstance(asked, str) else "")
        if isinstance(asked, str) or is_dry:
            return type(model)._sample(model, input_ids, *given, streamer=streamer, **others)
        return asked.run(decoding, input_ids, streamer)

    return original(*args, **kwargs, custom_generate=loop)


def _why_not_now(model: Any) -> str | None:
    if any(one.training for one in model.modules()):
        return "the model is training"
    if _GLOBAL._global_forward_hooks or _GLOBAL._global_forward_pre_hooks:
        return "there are hooks for all modules"
    # Not in the dtype of its weights.
    return "autocast is on" if torch.is_autocast_enabled(model.device.type) else None


def _why_not_arguments(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    for name in UNKNOWN_ARGUMENTS:
        if kwargs.get(name) is not None:
            return f"it is called with {name}"
    configs = kwargs.get("generation_config"), model.generation_config
    for name in OTHER_LOOPS:
        values = (kwargs.get(name), *(getattr(one, name, None) for one in configs))
        value = next((one for one in values if one is not None), None)
        is_one_beam = name == "num_beams" and value == 1
        if value not in (None, False) and not is_one_beam:
            return f"it decodes with {name}"
    if any(getattr(one, "stop_strings", None) for one in configs):
        return "its configuration has stop strings"
    if kwargs.get("stop_strings") is not None and kwargs.get("tokenizer") is None:
        return "it has stop strings and no tokenizer"
    return "it is called with more than one argument by position" if len(args) > 1 else None


def _with_strings(criteria: Any, tokenizer: Any, strings: Any) -> Any:
    """Return criteria with one that stops at strings."""
    # Only with transformers, which the model is from.
    from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

    return StoppingCriteriaList([*(criteria or ()), StopStringCriteria(tokenizer, strings)])


def _asked(
    input_ids: Tensor, processors: Any, criteria: Any, config: Any, others: dict[str, Any]
) -> _Call | str:
    """Return what a call asks for, or why the kernels do not support it."""
    why = _why_not_sized(input_ids)
    if why is not None:
        return why
    for one in criteria:
        name = type(one).__name__
        if not _is_of_transformers(one) or name not in GPU_CRITERIA + HOST_CRITERIA:
            return f"it stops by {name}"
    sampling = _sampling_of(processors, config)
    if isinstance(sampling, str):
        return sampling
    starts = _starts_of(others.get("attention_mask"), input_ids)
    if isinstance(starts, str):
        return starts
    stops = [one for item in criteria for one in _stops_of(item)]
    if len(stops) > MOST_STOPS:
        return f"it has {len(stops)} stop tokens, more than {MOST_STOPS}"
    most = min(one.max_length for one in criteria if type(one).__name__ == "MaxLengthCriteria")
    padding = config._pad_token_tensor
    on_host = [one for one in criteria if type(one).__name__ in HOST_CRITERIA]
    return _Call(
        sampling=sampling,
        starts=starts,
        stops=stops,
        padding=0 if padding is None else int(padding),
        # Criteria are asked after each token, so there is at least one.
        count=max(1, most - input_ids.shape[1]),
        criteria=on_host,
    )


def _why_not_sized(input_ids: Tensor) -> str | None:
    if not 1 <= input_ids.shape[0] <= MOST_BATCH:
        return f"its batch is {input_ids.shape[0]}, not 1 to {MOST_BATCH}"
    return "its prompt is empty" if not input_ids.shape[1] else None


def _sampling_of(processors: Any, config: Any) -> Sampling | str:
    found: dict[str, Any] = {}
    order = list(PROCESSORS)
    last = -1
    for one in processors:
        name = type(one).__name__
        if name not in PROCESSORS or not _is_of_transformers(one):
            return f"it processes logits by {name}"
        if order.index(name) <= last:
            return f"it processes logits by {name} after {order[last]}"
        last = order.index(name)
        if (
            getattr(one, "min_tokens_to_keep", 1) != 1
            or getattr(one, "filter_value", -math.inf) != -math.inf
        ):
            return f"its {name} keeps other tokens than that of `generate`"
        to, of = PROCESSORS[name]
        found[to] = getattr(one, of)
    return Sampling(is_sampled=True, **found) if config.do_sample else GREEDY


def _is_of_transformers(one: object) -> bool:
    """Return whether a processor or criterion is Hugging Face's, not one of the same name."""
    return type(one).__module__.startswith("transformers.generation.")


def _starts_of(mask: Tensor | None, input_ids: Tensor) -> Tensor | str | None:
    """Return where sequences start behind their padding; None: all at 0."""
    if mask is None:
        return None
    if mask.shape != input_ids.shape:
        return f"its attention mask has the shape {tuple(mask.shape)}"
    is_seen = mask != 0
    if bool((is_seen & (mask != 1)).any()):
        return "its attention mask holds more than 0 and 1"
    if bool(is_seen.all()):
        return None
    if not bool((is_seen[:, 1:] >= is_seen[:, :-1]).all() & is_seen[:, -1].all()):
        return "its padding is not on the left"
    return (~is_seen).sum(dim=1)


def _stops_of(criterion: Any) -> Iterable[int]:
    if type(criterion).__name__ != "EosTokenCriteria":
        return ()
    stops: list[int] = criterion.eos_token_id.flatten().tolist()
    return stops


class _Call:
    """One call of the loop: how it chooses tokens, and when it ends."""

    def __init__(
        self,
        sampling: Sampling,
        starts: Tensor | None,
        stops: list[int],
        padding: int,
        count: int,
        criteria: list[Any],
    ) -> None:
        self.sampling, self.starts, self.stops = sampling, starts, stops
        self.padding, self.count, self.criteria = padding, count, criteria

    def run(self, decoding: Decoding, input_ids: Tensor, streamer: Any) -> Tensor:
        """Return the prompts with the new tokens, (B, T)."""
        batch, length = input_ids.shape
        engine = decoding.engine(batch, length + self.count)
        with engine.on_stream():
            engine.begin(
                *(input_ids, self.starts, self.stops, self.padding),
                is_sampled=self.sampling.is_sampled,
            )
        rows = self._decode(engine, input_ids, streamer)
        if streamer is not None:
            streamer.end()
        new = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), batch)
        return torch.cat([input_ids, new.T.to(input_ids.device)], dim=1)

    def _decode(self, engine: Engine, input_ids: Tensor, streamer: Any) -> list[list[int]]:
        """Launch steps ahead of the tokens that arrive; return the tokens of each step."""
        stops = frozenset(self.stops)
        is_finished = [False] * engine.batch
        rows: list[list[int]] = []
        num_launched = 0
        while len(rows) < self.count and not all(is_finished):
            if num_launched < self.count and num_launched - len(rows) <= STEPS_OF_GRAPH:
                steps = min(STEPS_OF_GRAPH, self.count - num_launched)
                with engine.on_stream():
                    engine.run(steps, self.sampling)
                num_launched += steps
            row = _awaited(engine, len(rows))
            if stops:
                # Without stop tokens, a sequence that a string has stopped goes on.
                row = [
                    self.padding if done else one
                    for done, one in zip(is_finished, row, strict=True)
                ]
            rows.append(row)
            if streamer is not None:
                streamer.put(torch.tensor(row))
            is_finished = [done or one in stops for done, one in zip(is_finished, row, strict=True)]
            if self.criteria:
                is_finished = self._is_stopped(input_ids, rows, is_finished)
        return rows

    def _is_stopped(
        self, input_ids: Tensor, rows: list[list[int]], is_finished: list[bool]
    ) -> list[bool]:
        """Return which sequences the criteria for the host stop, or have stopped."""
        new = torch.tensor(rows, dtype=torch.int64).T
        tokens = torch.cat([input_ids.cpu(), new], dim=1)
        for criterion in self.criteria:
            stopped = criterion(tokens, None).tolist()
            is_finished = [one or now for one, now in zip(is_finished, stopped, strict=True)]
        return is_finished


def _awaited(engine: Engine, step: int) -> list[int]:
    """Return the tokens of a step as soon as all have arrived.

    Raises:
        KprofError: they have not arrived for half a minute.
    """
    latest = time.monotonic() + PATIENCE_S
    row = engine.arrived(step)
    while row is None:
        if time.monotonic() > latest:
            engine.is_lost = True
            # Waiting for the GPU might not end: this asks, and raises if a kernel has failed.
            state = "still runs" if engine.is_busy() else "has no more work"
            raise KprofError(
                f"token {step} has not arrived within {PATIENCE_S:.0f} s; the GPU {state}",
                fix="look for another process on the GPU with `nvidia-smi`, start the program "
                "again, and run it without `decode` if this returns",
            )
        time.sleep(POLL_S)
        row = engine.arrived(step)
    return row


EPS = 1e-6


def normed_product(x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
    """Return the RMS norm of rows (B, K) times weights (N, K), the first kernel of a layer."""
    x, gain, weight = x.contiguous(), gain.contiguous(), weight.contiguous()
    # Of the largest batch, so that a row has the same sums in all.
    outputs, columns = weight.shape
    tiling = tiling_of(outputs, columns, num_sms(x.device), batch=MOST_BATCH)
    y = torch.empty(x.shape[0], outputs, dtype=torch.float32, device=x.device)
    if y.numel():
        options = launch_options(tiling.warps, launches_early(x.device))
        launch_linear(x, gain, (Weight(weight, None),), y, tiling, options, eps=EPS)
    return y.to(x.dtype)


def _reference(x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return functional.linear(gain * wide.to(x.dtype), weight)


def _refuses(x: Tensor, gain: Tensor, weight: Tensor) -> str | None:
    if x.dim() != 2 or weight.dim() != 2 or gain.shape != x.shape[1:]:
        return f"x {tuple(x.shape)}, gain {tuple(gain.shape)}, weight {tuple(weight.shape)}"
    if weight.shape[1] != x.shape[1] or not x.shape[1]:
        return f"{x.shape[1]} columns, weights for {weight.shape[1]}"
    if x.dtype not in DTYPES or gain.dtype != x.dtype or weight.dtype != x.dtype:
        return f"x in {x.dtype}, gain in {gain.dtype}, weight in {weight.dtype}"
    return None if x.shape[0] <= MOST_BATCH else f"{x.shape[0]} rows, more than {MOST_BATCH}"


def _inputs(shape: Shape, draw: Draw) -> tuple[Any, ...]:
    rows, columns, outputs = shape
    weight = draw.plain(outputs, columns, scale=max(columns, 1) ** -0.5)
    return draw(rows, columns), draw.plain(columns, scale=0.1, shift=1.0), weight


def _work(x: Tensor, gain: Tensor, weight: Tensor) -> Work:
    """Count one product; x, gain and weight are read, and the result is written."""
    elements = x.numel() + gain.numel() + weight.numel() + x.shape[0] * weight.shape[0]
    return Work(2 * x.shape[0] * weight.numel(), elements * x.element_size())


KERNEL = Kernel(
    name="decode",
    replaces="generate of causal language models; the gate checks its product with a norm before",
    reference=_reference,
    truth=_reference,
    providers=(
        Provider(OURS, lambda: normed_product, "kprof"),
        Provider("aten", lambda: _reference),
        Provider("inductor", lambda: torch.compile(_reference, dynamic=False)),
    ),
    refuses=_refuses,
    inputs=_inputs,
    work=_work,
    shapes=((1, 2_048, 3_072), (8, 2_048, 3_072)),
    edges=((1, 8, 1), (3, 37, 5), (2, 1_536, 9), (8, 264, 17)),
    reach=(MOST_BATCH,),
    rows=(0,),
)
