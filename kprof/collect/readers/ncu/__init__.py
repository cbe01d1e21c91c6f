"""Parts of the reader of Nsight Compute's reports."""
