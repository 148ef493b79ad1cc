"""Hypothesis strategy for texts."""

from __future__ import annotations

import hypothesis.strategies as st

CHARACTERS = st.characters(exclude_categories=("Cs",))
"""All characters but surrogates: those that `st.text()` lists by encoding each of a million, two seconds a process."""
