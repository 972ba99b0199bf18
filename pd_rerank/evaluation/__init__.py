"""Measures of rankings and decisions, from files alone: no engine, no first stage and no reranker is imported here.

Each module goes from per-query records to aggregates: `ranking` (quality against judgements), `presentations` and
`stability` (what changes when candidates arrive in another order), `order_effects` (where that comes from),
`pool_change` (what a changed pool does), `consumers` (what a reader, a verdict or a chosen pair makes of it),
`pairs`, `preference`, `replay` and `diagnosis` (which of two passages is preferred, where it stands, what decided),
`resampling` (how sure a figure is).
"""
