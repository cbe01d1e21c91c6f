"""Parts of the reader of Proton's profiles."""
