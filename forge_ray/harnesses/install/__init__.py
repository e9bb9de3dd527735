"""Programs at pinned versions, from npm, PyPI or crates.io, in one cache outside any checkout; see `package` and `__main__`."""
