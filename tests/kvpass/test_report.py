"""The report as text, as numbers and as a picture."""

import html
import json

import pytest
import torch
from matplotlib.figure import Figure

from compiled_models import padded, two_layers


def report(family="llama", **options):
    """The report of a batch of two prompts, and their cache."""
    _, fast = two_layers(family, **options)
    cache = fast(*padded(60, 33)).past_key_values
    return fast.report(), cache


def test_the_text_states_what_was_kept():
    found, cache = report(policy="snapkv", budget=16)
    text = str(found)
    assert "kvpass: snapkv, budget 16" in text and "prompt tokens: 60, 33" in text
    assert f"entries kept: {2 * 16 * 4} of {(60 + 33) * 4}" in text and str(cache.nbytes) in text
    assert "compiled prefill of 2 or more rows (eager): 2 attention sites rewritten" in text
    assert "may keep more or fewer" not in text
    released = report(policy="lava", budget=16, parity="code")[0]
    assert "parity='code': released rules, which may keep more or fewer" in str(released)
    assert released._repr_html_() == f"<pre>{html.escape(str(released))}</pre>"


def test_the_dictionary_is_json_and_adds_up():
    found, cache = report(policy="lava", budget=16)
    numbers = json.loads(json.dumps(found.to_dict()))
    assert numbers["lengths"] == cache.lengths.tolist()
    assert numbers["budget_entries"] == [16, 16] and numbers["prompt_tokens"] == [60, 33]
    entry = cache.state.full_layers[0].geometry.entry_bytes()
    assert numbers["bytes_full"] == (60 + 33) * 4 * entry
    assert sum(sum(map(sum, row)) for row in numbers["bytes_kept"]) == 2 * 16 * 4 * entry
    assert all(weight > 0 for row in numbers["layer_weights"] for weight in row)


def test_a_model_whose_layers_all_slide_keeps_nothing_under_the_budget():
    found, cache = report("mistral_sliding", budget=16)
    assert found.lengths.shape == found.bytes_kept.shape == found.attention_mass.shape == (2, 0, 0)
    assert cache.lengths.shape == (2, 0, 0) and cache.positions.shape == (2, 0, 0, 0) and cache.layer_ids == ()
    assert found.lengths.dtype == found.bytes_kept.dtype == cache.positions.dtype == torch.int64
    assert found.bytes_full == found.bytes_kept.sum() == 0 and found.layer_ids == ()
    numbers = json.loads(json.dumps(found.to_dict()))
    assert numbers["lengths"] == numbers["layer_weights"] == [[], []]
    assert numbers["ring_nbytes"] == cache.nbytes - cache.ids.nbytes - 2 * 8
    assert "ring of 24" in str(found)


def test_the_picture_is_written(tmp_path, monkeypatch):
    figures = []
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self) or savefig(self, *a, **k))
    found, _ = report(policy="lava", budget=16)
    path = found.plot(tmp_path / "kept.png", row=1, marks={"facts": [3, 20]})
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    kept = figures[0].axes[1]
    (marks,) = kept.collections
    assert kept.texts[0].get_text() == marks.get_label() == "facts" and marks.get_offsets()[:, 0].tolist() == [3, 20]
    shown = kept.images[0].get_array()
    assert shown.mask.any() and not shown.mask[:, -8:].any()  # white where nothing is kept; the window is kept


def test_two_reports_stand_side_by_side_in_the_same_colours(tmp_path, monkeypatch):
    figures = []
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self) or savefig(self, *a, **k))
    found, other = (report(policy=policy, budget=16)[0] for policy in ("lava", "streaming_llm"))
    titles = ["lava answers '7'", "streaming_llm answers '$ \\frac'"]
    found.plot(tmp_path / "kept.png", other, row=1, marks={"fact": [3], "others": [9, 20]}, titles=titles)
    *lengths, left, right = figures[0].axes[:4]
    assert [axis.get_title() for axis in lengths] == ["lava, budget 16", "streaming_llm, budget 16"]
    assert [left.get_title(), right.get_title()] == titles
    for one, axis, kept in zip((found, other), lengths, (left, right), strict=True):
        shown = axis.images[0].get_array()
        assert shown.tolist() == one.lengths[1].tolist()
        share = kept.images[0].get_array()  # of 33 positions, each a bin
        assert (share.filled(0).sum(1) * shown.shape[1]).round().tolist() == shown.sum(1).tolist()
        assert [text.get_text() for text in kept.texts] == ["fact", "others"]
    both = {(*axis.images[0].get_clim(), axis.images[0].get_cmap().name) for axis in lengths}
    ((least, most, _),) = both
    assert (least, most) == (found.lengths[1].min(), found.lengths[1].max()) and least < most
    assert len({(*axis.images[0].get_clim(), axis.images[0].get_cmap().name) for axis in (left, right)}) == 1
    assert [axis.get_ylabel() for axis in figures[0].axes[4:]] == ["entries kept", "share of positions kept"]


def test_reports_of_two_prompts_share_no_picture(tmp_path):
    found, _ = report(policy="lava", budget=16)
    _, fast = two_layers(policy="snapkv", budget=16)
    fast(*padded(60, 34))
    with pytest.raises(ValueError, match="these reports are not of the same prompt"):
        found.plot(tmp_path / "kept.png", fast.report())
    assert not (tmp_path / "kept.png").exists()
