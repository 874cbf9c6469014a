"""Texts of many scripts for hypothesis, and how long it may look."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

TEXTS = st.text(
    st.one_of(
        st.sampled_from("ab \n"),
        st.sampled_from("éßñ"),
        st.sampled_from("日本語한"),
        st.sampled_from("👍🏽🎉𝄞"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=30,
).filter(lambda text: "<|" not in text)  # hypothesis also tries texts that it finds in the code: special tokens
QUICK = settings(max_examples=25, suppress_health_check=list(HealthCheck))
