"""Work of operators that only describe or allocate memory: none.

If such an operator has to copy or set memory, an operator inside it does, and has that work.
"""

from __future__ import annotations

from kprof.analyze.work import Inputs, Model, Work


def _nothing(inputs: Inputs) -> Work | None:
    """Model an operator that moves no element, of a tensor that was recorded."""
    return None if inputs.tensor(0) is None else Work(0, 0)


def _nothing_of(inputs: Inputs) -> Work | None:
    """Model an operator that moves no element, with any arguments."""
    return Work(0, 0) if inputs.dtypes else None


_VIEWS = (
    "alias as_strided as_strided_ chunk clone contiguous detach detach_ diagonal empty_like expand"
    " expand_as flatten lift_fresh movedim narrow new_empty new_empty_strided ones_like permute"
    " real imag reshape resize_ resolve_conj resolve_neg select set_ slice split split_with_sizes"
    " squeeze squeeze_ swapaxes t t_ _to_copy to transpose transpose_ type_as unbind unflatten"
    " unfold unsqueeze unsqueeze_ unsafe_chunk unsafe_split unsafe_split_with_sizes view"
    " view_as view_as_complex view_as_real zeros_like _conj _neg_view _reshape_alias"
    " _unsafe_view _fw_primal _has_compatible_shallow_copy_type is_nonzero item output_nr"
    " broadcast_to detach_copy full_like new_full new_ones new_zeros record_stream"
)
_ALLOCATIONS = (
    "empty empty_strided empty_permuted full ones scalar_tensor zeros _efficientzerotensor"
)

MODELS: dict[str, Model] = {
    **{f"aten::{name}": _nothing for name in _VIEWS.split()},
    **{f"aten::{name}": _nothing_of for name in _ALLOCATIONS.split()},
}
