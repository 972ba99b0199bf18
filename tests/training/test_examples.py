"""Windows and views of pools: which documents stand where, what is counted, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pd_rerank import windows
from pd_rerank.errors import BadArgument, InvalidData, ModelMismatch
from pd_rerank.pool import Candidate, Pool
from pd_rerank.prompt import GradePrompt
from pd_rerank.training.examples import Examples, Recipe, epoch_order, relevant_by_slot
from pd_rerank.training.labels import Label, Labels
from tests.tokenizers_for_tests import byte_level

ROOM = 100_000


def pool(query_id: str = "q1", n: int = 7, *, query: str = "which tide is high?") -> Pool:
    found = [Candidate(doc_id=f"{query_id}-d{i}", text=f"passage {i} of {query_id}") for i in range(n)]
    return Pool(query_id=query_id, query=query, candidates=tuple(found))


def labels_of(pools: Sequence[Pool], **manifest: Any) -> Labels:
    """Document i of a pool has the scores i mod 4 and 0, and all probability on the first."""
    found = [
        Label(
            query_id=p.query_id,
            doc_id=doc_id,
            scores=(float(i % 4), 0.0),
            grade_probabilities=tuple(float(g == i % 4) for g in range(4)),
        )
        for p in pools
        for i, doc_id in enumerate(p.doc_ids)
    ]
    return Labels(found, manifest=manifest)


def examples(pools: Sequence[Pool], recipe: Recipe, *, room: int = ROOM, **more: Any) -> Examples:
    prompt = GradePrompt(byte_level())
    return Examples(pools, labels_of(pools), prompts=prompt, recipe=recipe, max_tokens=room, **more)


def shown(example: Any) -> list[list[int]]:
    """The pool positions each view shows, slot by slot; -1 for companions that are not of the example."""
    return [[int(example.positions[i]) if i >= 0 else -1 for i in view.shows] for view in example.views]


def text_of(prompt: Any) -> str:
    return str(byte_level().decode(prompt.token_ids))


@pytest.mark.parametrize(
    ("text", "seed"),
    [
        ("0:0:q1:0", 13262485098473454748),
        ("0:0:q1:1", 17416048900784198341),
        ("1:0:q1:0", 12022766493922051361),
        ("1:0:q1:1", 7688936097339725926),
    ],
)
def test_view_seeds_are_those_of_the_method(text: str, seed: int) -> None:
    base, epoch, query_id, window = text.split(":")
    assert windows.view_seed(int(base), epoch=int(epoch), query_id=query_id, window=int(window)) == seed


def test_two_views_show_one_window_in_the_methods_two_orders() -> None:
    made = examples([pool(n=20)], Recipe(width=20))
    assert len(made) == 1
    assert shown(made[0]) == [
        [13, 11, 4, 18, 10, 1, 15, 14, 16, 19, 8, 3, 0, 6, 9, 2, 7, 12, 5, 17],
        [8, 5, 3, 17, 15, 10, 16, 0, 14, 18, 12, 11, 6, 1, 9, 2, 7, 13, 4, 19],
    ]


def test_views_that_would_be_the_same_are_made_to_differ() -> None:
    # By the seeds alone both views of this window are [0, 3, 2, 1, 4] (method, section 9).
    first, second = shown(examples([pool(n=5)], Recipe(width=5))[0])
    assert first == [0, 3, 2, 1, 4]
    assert second != first
    assert sorted(second) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("views", ["within_window", "markers", "repartition", "replacement"])
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_no_two_views_of_a_small_window_are_alike(views: Any, n: int) -> None:
    pools = [pool(f"q{i}", n) for i in range(30)]
    prompts: Any = GradePrompt(byte_level())
    if views == "markers":
        prompts = [GradePrompt(byte_level(), markers=m) for m in ("numeric", "alpha")]
    recipe = Recipe(width=2 if views == "repartition" else 5, views=views)
    made = Examples(pools, labels_of(pools), prompts=prompts, recipe=recipe, max_tokens=ROOM)
    for example in made:
        if len(example.positions) > 1:
            told = [tuple(p.token_ids.tobytes() for p in view.prompts) for view in example.views]
            assert len(set(told)) == len(told) == 2


def test_there_are_no_more_views_than_orders() -> None:
    example = examples([pool(n=2)], Recipe(width=2, seeds=(0, 1, 2, 3)))[0]
    assert sorted(shown(example)) == [[0, 1], [1, 0]]


def test_a_window_of_one_is_kept_with_one_view() -> None:
    made = examples([pool(n=7)], Recipe(width=3))
    assert [len(example.views) for example in made] == [2, 2, 1]
    assert made.plan.singles == 1
    assert made[2].positions.tolist() == [6]


def test_plain_windows_are_the_first_stages_order_unshuffled() -> None:
    made = examples([pool(n=7)], Recipe(width=3, views="none", seeds=(0,)))
    assert [shown(example) for example in made] == [[[0, 1, 2]], [[3, 4, 5]], [[6]]]
    dealt = examples([pool(n=7)], Recipe(width=3, views="none", seeds=(0,), partition="round_robin"))
    assert [shown(example) for example in dealt] == [[[0, 3, 6]], [[1, 4]], [[2, 5]]]


def test_whole_pool_shuffles_give_as_many_times_the_windows_and_are_the_same_for_every_query() -> None:
    pools = [pool("a", 10), pool("b", 10)]
    made = examples(pools, Recipe(width=5, views="whole_pool"))
    assert len(made) == 8
    assert shown(made[0]) == shown(made[4]) == [[7, 8, 1, 5, 3]]
    assert shown(made[2]) == shown(made[6]) == [[6, 8, 9, 7, 5]]
    assert all(len(example.views) == 1 for example in made)
    assert shown(made.example(0, epoch=1)) == [[5, 9, 3, 4, 6]], "the second epoch goes on with seed 2"


def test_labels_stay_with_their_documents_in_every_view() -> None:
    for views in ("within_window", "whole_pool", "repartition", "replacement", "dropout"):
        for example in examples([pool(n=9)], Recipe(width=4, views=views), probabilities=True):  # type: ignore[arg-type]
            assert example.targets.tolist() == [float(p % 4) for p in example.positions]
            assert example.probabilities is not None
            assert example.probabilities.argmax(axis=1).tolist() == [p % 4 for p in example.positions]
            for view, order in zip(example.views, shown(example), strict=True):
                lines = "\n".join(text_of(prompt) for prompt in view.prompts).split("\n")
                told = [line for line in lines if " passage " in line]
                for line, position in zip(told, order, strict=True):
                    if position >= 0:
                        assert f"passage {position} of q1" in line


def test_order_averaged_targets_are_the_mean_over_the_teachers_orders() -> None:
    made = examples([pool(n=4)], Recipe(width=4, targets="averaged"))
    assert made[0].targets.tolist() == [0.0, 0.5, 1.0, 1.5]


def test_dropout_views_show_the_same_prompt() -> None:
    example = examples([pool(n=4)], Recipe(width=4, views="dropout"))[0]
    assert shown(example) == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_repartition_changes_companions_and_keeps_the_documents() -> None:
    made = examples([pool(n=10)], Recipe(width=2, views="repartition"))
    assert [sorted(example.positions.tolist()) for example in made] == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9]]
    for example in made:
        first, second = ([frozenset(order[i : i + 2]) for i in range(0, len(order), 2)] for order in shown(example))
        assert set().union(*first) == set().union(*second) == set(example.positions.tolist())
        assert example.shown.all()
    kept = shown(made[1])[0]
    assert [set(kept[i : i + 2]) for i in (0, 2, 4)] == [{4, 5}, {6, 7}, {8, 9}], "view 0 keeps the windows"


def test_replacement_exchanges_some_for_others_of_the_pool_and_compares_who_stayed() -> None:
    made = examples([pool(n=12)], Recipe(width=6, views="replacement", replaced=2))
    for example in made:
        first, second = shown(example)
        assert sorted(first) == sorted(example.positions.tolist())
        assert second.count(-1) == 2
        assert example.shown.sum(axis=1).tolist() == [6, 4]
        others = [f"passage {p} of" for p in range(12) if p not in example.positions]
        assert sum(other in text_of(example.views[1].prompts[0]) for other in others) == 2


def test_replacement_leaves_out_where_the_pool_has_no_others() -> None:
    example = examples([pool(n=4)], Recipe(width=4, views="replacement"))[0]
    assert len(example.views[1].shows) == 3
    assert example.shown.sum(axis=1).tolist() == [4, 3]


def test_marker_views_draw_their_scheme_from_the_views_seed() -> None:
    pools = [pool(f"q{i}", 4) for i in range(12)]
    prompts = [GradePrompt(byte_level(), markers=m) for m in ("numeric", "alpha", "doc_n")]
    made = Examples(pools, labels_of(pools), prompts=prompts, recipe=Recipe(width=4, views="markers"), max_tokens=ROOM)
    signs = ["[1] ", "[A] ", "[Doc-1] "]
    drawn = [[sum(i * (s in text_of(v.prompts[0])) for i, s in enumerate(signs)) for v in e.views] for e in made]
    assert {scheme for pair in drawn for scheme in pair} == {0, 1, 2}
    again = Examples(pools, labels_of(pools), prompts=prompts, recipe=Recipe(width=4, views="markers"), max_tokens=ROOM)
    assert [e.views[1].prompts[0].token_ids.tolist() for e in made] == [
        e.views[1].prompts[0].token_ids.tolist() for e in again
    ]


def test_marker_views_deal_the_markers_out_in_any_order() -> None:
    """By hand, from random.Random(view seed XOR 0x5BD1E995): randrange(3), then a shuffle of 0 … 3.

    View 0 (seed 13262485098473454748) draws 1 and [1, 0, 2, 3]; view 1 (12022766493922051361) 2 and [2, 1, 0, 3].
    """
    prompts = [GradePrompt(byte_level(), markers=m) for m in ("numeric", "alpha", "doc_n")]
    recipe = Recipe(width=4, views="markers")
    (example,) = Examples([pool(n=4)], labels_of([pool(n=4)]), prompts=prompts, recipe=recipe, max_tokens=ROOM)
    for number, marks in enumerate((["[B]", "[A]", "[C]", "[D]"], ["[Doc-3]", "[Doc-2]", "[Doc-1]", "[Doc-4]"])):
        lines = text_of(example.views[number].prompts[0]).splitlines()
        order = shown(example)[number]
        told = [line for line in lines if line.startswith("[") and " passage " in line]
        assert told == [f"{mark} passage {p} of q1" for mark, p in zip(marks, order, strict=True)]
        assert [line.split()[0] for line in lines if " Grade:" in line and line.startswith("[")] == marks
    assert shown(example)[0] == [0, 3, 2, 1]


def test_canonical_order_does_not_depend_on_arrival() -> None:
    one = pool(n=9)
    other = Pool(query_id="q1", query=one.query, candidates=one.candidates[::-1])
    recipe = Recipe(width=4, views="none", seeds=(0,), order="canonical")
    for a, b in zip(examples([one], recipe), examples([other], recipe), strict=True):
        assert a.views[0].prompts[0].token_ids.tolist() == b.views[0].prompts[0].token_ids.tolist()


def test_views_change_with_the_epoch_and_windows_do_not() -> None:
    made = examples([pool(n=8)], Recipe(width=8))
    first, second = made.example(0), made.example(0, epoch=1)
    assert first.positions.tolist() == second.positions.tolist()
    assert shown(first) != shown(second)


def test_blank_documents_are_left_out_and_counted() -> None:
    blank = Candidate(doc_id="blank", text=" \u200b")
    one = pool(n=4)
    made = examples([Pool(query_id="q1", query="q", candidates=(blank, *one.candidates))], Recipe(width=3))
    assert [e.positions.tolist() for e in made] == [[1, 2, 3], [4]]
    assert made.plan.blank == 1


def test_what_is_too_long_is_shortened_or_dropped_and_counted() -> None:
    fits = GradePrompt(byte_level()).sheet("q", ["x"], width=1, max_tokens=ROOM).window([0])
    room = len(fits.token_ids) + 150
    long_text = Candidate(doc_id="long", text="tide " * 200)
    pools = [
        Pool(query_id="q0", query="q", candidates=(long_text, Candidate(doc_id="short", text="tide"))),
        pool("q1", 3, query="tide " * 200),
        pool("q2", 2, query="q"),
        pool("q3", 3, query="tide " * 200),
    ]
    made = examples(pools, Recipe(width=2), room=room)
    assert list(made.plan.dropped) == ["q1", "q3"]
    assert "leaves no room for a document" in made.plan.dropped["q1"]
    assert made.plan.shortened == 1
    assert {e.query_id for e in made} == {"q0", "q2"}
    assert max(len(p.token_ids) for e in made for v in e.views for p in v.prompts) <= room
    assert "2 queries dropped" in str(made.plan)


def test_windows_narrow_where_documents_would_be_cut_too_short() -> None:
    one = len(GradePrompt(byte_level()).sheet("q", ["x"], width=1, max_tokens=ROOM).window([0]).token_ids)
    texts = [Candidate(doc_id=f"d{i}", text=f"{i} " + "tide moon sea " * 30) for i in range(8)]
    made = examples([Pool(query_id="q", query="q", candidates=tuple(texts))], Recipe(width=8), room=one + 200)
    assert made.plan.narrowed == 1
    assert 1 < max(len(e.positions) for e in made) < 8


def test_nothing_left_is_an_error_that_says_why() -> None:
    with pytest.raises(InvalidData, match=r"no window is left of 2 pools; first 'q0': .*leaves no room") as caught:
        examples([pool(f"q{i}", 3, query="tide " * 200) for i in range(2)], Recipe(width=2), room=300)
    assert caught.value.exit_code == 5
    with pytest.raises(InvalidData, match="the pools are empty"):
        examples([Pool(query_id="q", query="q", candidates=())], Recipe(width=2))


def test_labels_of_other_pools_are_refused_with_a_list() -> None:
    mine, others = [pool("a", 3), pool("b", 3)], [pool("c", 3)]
    prompt = GradePrompt(byte_level())
    with pytest.raises(InvalidData, match=r"'a': 3 of 3 .*'b': 3 of 3 .*other pools"):
        Examples(mine, labels_of(others), prompts=prompt, recipe=Recipe(width=3), max_tokens=ROOM)


def test_labels_of_another_template_are_refused_unless_that_is_meant() -> None:
    mine = [pool("a", 3)]
    prompt = GradePrompt(byte_level())
    labels = labels_of(mine, prompt={"template_hash": "f" * 64, "markers": "alpha"})
    with pytest.raises(ModelMismatch, match=r"the label file was made with prompt template f+.*markers") as caught:
        Examples(mine, labels, prompts=prompt, recipe=Recipe(width=3), max_tokens=ROOM)
    assert caught.value.exit_code == 5
    made = Examples(mine, labels, prompts=prompt, recipe=Recipe(width=3), max_tokens=ROOM, check_template=False)
    assert len(made) == 1


def test_probabilities_are_asked_for_only_where_they_are_needed() -> None:
    mine = [pool("a", 3)]
    bare = Labels([Label(query_id="a", doc_id=d, scores=(1.0,)) for d in mine[0].doc_ids], manifest={})
    prompt = GradePrompt(byte_level())
    made = Examples(mine, bare, prompts=prompt, recipe=Recipe(width=3), max_tokens=ROOM)
    assert made[0].probabilities is None
    with pytest.raises(InvalidData, match="set distribution to 0"):
        Examples(mine, bare, prompts=prompt, recipe=Recipe(width=3), max_tokens=ROOM, probabilities=True)


def test_slot_weights_go_by_the_first_stages_slot_whatever_the_view_shows() -> None:
    made = examples([pool(n=6)], Recipe(width=3, views="whole_pool"), slot_weights=[1.0, 2.0, 3.0])
    for example in made:
        assert example.weights is not None
        assert example.weights.tolist() == [p % 3 + 1.0 for p in example.positions]
    with pytest.raises(BadArgument, match="2 slot weights for windows of 3"):
        examples([pool(n=6)], Recipe(width=3), slot_weights=[1.0, 2.0])


def test_relevant_documents_are_counted_by_slot() -> None:
    qrels = {"q1": {"q1-d0": 2, "q1-d3": 1, "q1-d4": 0, "q1-d5": -1}}
    assert relevant_by_slot([pool(n=7), pool("q2", 3)], qrels, width=3) == [2, 0, 0]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"views": "sideways"}, "unknown views 'sideways'"),
        ({"width": 0}, "width must be a whole number of at least 1"),
        ({"seeds": (1, 1)}, "a seed of its own"),
        ({"seeds": (1,)}, "needs 2 seeds or more, got 1"),
        ({"width": 1}, "which a width of 1 has not"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(made: dict[str, Any], says: str) -> None:
    with pytest.raises(BadArgument, match=says):
        Recipe(**made)


def test_an_epoch_takes_every_example_once_and_fills_the_last_step_from_its_start() -> None:
    order = epoch_order(10, seed=42, epoch=0, multiple=4)
    assert sorted(order[:10].tolist()) == list(range(10))
    assert order[10:].tolist() == order[:2].tolist()
    assert epoch_order(10, seed=42, epoch=1, multiple=4).tolist() != order.tolist()
    assert np.array_equal(epoch_order(10, seed=42, epoch=0, multiple=5), order[:10])
    assert len(epoch_order(1, seed=0, epoch=0, multiple=64)) == 64
