"""Drafts in a reply's timings and on the metrics page, by who made them."""

from __future__ import annotations

import dataclasses

from prometheus_client.parser import text_string_to_metric_families
from scripted import FakeEngine, finished

from tfglm.engine.api import DraftCount, Snapshot, Started

COUNTS = (DraftCount("copy-prompt", 4, 3), DraftCount("mtp", 10, 6))
SLOTS = (DraftCount("copy-prompt", 4, 3, 0), DraftCount("mtp", 5, 4, 0), DraftCount("mtp", 5, 2, 1))


async def test_a_reply_tells_its_drafts_by_source(make_api):
    end = finished()
    usage = dataclasses.replace(end.usage, drafted_tokens=14, accepted_tokens=9, drafts=COUNTS)
    api = await make_api([Started(1.0), dataclasses.replace(end, usage=usage)])
    _, reply = await api.chat()
    assert (reply["timings"]["draft_n"], reply["timings"]["draft_n_accepted"]) == (14, 9)
    assert reply["timings"]["drafts"] == {
        "copy-prompt": {"drafted": 4, "accepted": 3},
        "mtp": {"drafted": 10, "accepted": 6},
    }


async def test_metrics_tell_drafts_by_source_and_position(make_api, monkeypatch):
    plain = FakeEngine.snapshot

    def snapshot(self: FakeEngine) -> Snapshot:
        return dataclasses.replace(plain(self), drafts=SLOTS)

    monkeypatch.setattr(FakeEngine, "snapshot", snapshot)
    api = await make_api([Started(1.0), finished()])
    async with api.session.get(api.url + "/metrics") as response:
        page = await response.text()
    values = {
        (sample.name, sample.labels.get("source"), sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    assert values["tfglm:draft_tokens_total", "mtp", "1"] == 5
    assert values["tfglm:draft_tokens_accepted_total", "mtp", "1"] == 2
    assert values["tfglm:draft_tokens_accepted_total", "copy-prompt", "0"] == 3
    assert values["vllm:spec_decode_num_accepted_tokens_per_pos_total", None, "0"] == 7
