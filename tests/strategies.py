"""What several property tests draw from."""

from __future__ import annotations

from hypothesis import strategies as st

from ckptio.boxes import Box

shapes = st.lists(st.integers(1, 6), max_size=4).map(tuple)


@st.composite
def boxed(draw, *, empty=False):
    """A shape, and a box inside it."""
    shape = draw(shapes)
    start, length = [], []
    for n in shape:
        a = draw(st.integers(0, n if empty else n - 1))
        start.append(a)
        length.append(draw(st.integers(0 if empty else 1, n - a)))
    return shape, Box(tuple(start), tuple(length))
