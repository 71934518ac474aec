"""`pipesd-edge pair` as its users run it: verdicts, what was measured, what is refused."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf", reason="the gguf package is not installed")

from pipesd.cloud.admission import Identity
from pipesd.core import ModelInfo, Vocabulary
from pipesd.edge import pair_sample
from pipesd.edge.drafter import Drafter, estimate_bytes
from pipesd.edge.pair_models import ModelFacts, read_gguf
from pipesd.edge.pair_report import as_json, compare, describe, differs
from pipesd.edge.pair_served import refused_gguf
from pipesd.free_memory import Free
from pipesd.sim.texts import KeyedText
from pipesd.sizes import counted, size_text
from tests.clouds import NOWHERE, Serving, serving
from tests.pair_facts import FACTS
from tests.pairs import Make, maker, pair, report
from tests.programs import Program, bad_files, edge
from tests.tiny import write_tiny
from tests.tiny_mamba import write_tiny_mamba

QUICK = ["--tokens", "12", "--prompt", "def f(x):"]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return maker(tmp_path_factory.mktemp("tiny"))


# ---- verdicts


def test_a_person_reads_what_fits_and_the_verdict_last(make: Make) -> None:
    ran = edge("pair", "--draft", make(noise=0.03, dtype="q8_0"), "--target", make(), *QUICK)
    assert ran.code == 0
    rows = [line.split("  ", 1)[0] for line in ran.out.splitlines()]
    assert rows == [
        "draft", "target", "vocabulary", "end tokens", "start token", "chat template", "context", "cost", "acceptance",
        "verdict",
    ]  # fmt: skip
    assert ran.out.endswith("verdict        fits\n")
    assert "the same 512 ids" in ran.out and "both computed here by llama.cpp" in ran.out
    assert "loading both models" in ran.err
    assert pair(make(noise=0.03, dtype="q8_0"), make(), *QUICK, "--quiet").err == ""


def test_parts_that_are_links_into_a_store_are_read_as_the_whole(tmp_path: Path) -> None:
    """As in a hub's cache, where the files themselves are named after their contents."""
    for name in ("split", "blobs", "links"):
        (tmp_path / name).mkdir()
    whole, first = write_tiny(tmp_path / "m.gguf"), write_tiny(tmp_path / "split" / "m.gguf", split=9)
    parts = sorted(first.parent.iterdir())
    (tmp_path / "links" / "draft.gguf").symlink_to(parts[1])
    facts = [read_gguf(whole), read_gguf(tmp_path / "links" / "draft.gguf")]
    for number, part in enumerate(parts):
        (tmp_path / "links" / part.name).symlink_to(part.rename(tmp_path / "blobs" / str(number)))
    facts += [read_gguf(tmp_path / "links" / part.name) for part in parts]
    assert [found.path for found in facts[2:]] == [tmp_path / "links" / first.name] * 3
    assert len({(found.parameters, found.weight_bytes, found.vocabulary) for found in facts}) == 1
    Drafter(tmp_path / "links" / parts[1].name).close()


def test_swapped_ids_do_not_fit_and_are_named(make: Make) -> None:
    ran = edge("pair", "--draft", make(), "--target", make(swap=(300, 301)))
    assert (ran.code, ran.err) == (4, "")
    last = ran.out.splitlines()[-1]
    assert last.startswith("verdict        does not fit: id 300 is ' p' to the draft model and ' h' to the target")
    assert "take a draft model" in last and "acceptance" not in ran.out
    found = report(pair(make(), make(swap=(300, 301)), "--json"))
    assert found["fits"] is False and found["acceptance"] is None and found["error"] is None
    assert found["first_difference"] == {"id": 300, "draft": " p", "target": " h"}


@pytest.mark.parametrize("wider", ["draft", "target"])
def test_padding_does_not_count(make: Make, wider: str) -> None:
    wide, narrow = make(n_vocab=544, n_real=512), make()
    draft, target = (wide, narrow) if wider == "draft" else (narrow, wide)
    ran = pair(draft, target, *QUICK)
    assert ran.code == 0 and "output layers" in ran.out and "only padding" in ran.out


def test_a_vocabulary_that_ends_earlier_does_not_fit(make: Make) -> None:
    ran = pair(make(n_vocab=500), make())
    assert ran.code == 4 and "500 ids in the draft, 512 in the target" in ran.out and "id 500 is ''" in ran.out


def test_each_remark(make: Make) -> None:
    """What fits all the same, said one by one."""
    draft = make(context=256, eos_id=300, add_bos=True, bos_id=256, dtype="q8_0")
    found = report(pair(draft, make(seed=5), *QUICK, "--json", "--quiet"))
    assert found["fits"] is True and found["verdict"] == "fits, with 3 remarks"
    for told in ("prompts get a start token", "context ends at 256", "few drafts are accepted"):
        assert sum(told in remark for remark in found["remarks"]) == 1, told
    assert (found["same_end_ids"], found["same_start_token"], found["context"]) == (False, False, 512)
    found = report(pair(make(), make(add_bos=True, architecture="llama", name="other"), *QUICK, "--json", "--quiet"))
    assert any("prompts lack the start token" in remark for remark in found["remarks"])
    assert any("not much smaller" in remark for remark in found["remarks"])


def test_start_tokens(make: Make) -> None:
    plain, first, second = (read_gguf(make(add_bos=bool(bos), bos_id=bos or 257)) for bos in (0, 256, 257))
    lacking = [compare(*pair).remarks for pair in ((plain, first), (second, first), (first, first), (first, plain))]
    assert [any("lack the start token" in remark for remark in each) for each in lacking] == [True, True, False, False]


def test_end_tokens_of_either_side_are_shown(make: Make) -> None:
    shown = describe(compare(read_gguf(make(eos_id=300)), read_gguf(make())), ascii_only=False)
    assert (
        "end tokens     the same: <|endoftext|> (256), <|im_end|> (258); also  p (300), by the draft's files\n" in shown
    )


def test_templates(make: Make, tmp_path: Path) -> None:
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(make().read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_templat_"))
    other = tmp_path / "other.gguf"
    other.write_bytes(make().read_bytes().replace(b"add_generation_prompt", b"add_generation_prompX"))
    facts, without, differing = map(read_gguf, (make(), bare, other))
    assert any("no chat template" in remark for remark in compare(without, facts).remarks)
    assert any("templates differ" in remark for remark in compare(facts, differing).remarks)
    assert not any("template" in remark for remark in compare(facts, without).remarks)
    shown = [describe(compare(*both), ascii_only=True) for both in ((without, without), (facts, without))]
    assert "in neither" in shown[0] and "only in the draft" in shown[1]


def test_an_architecture_that_the_cloud_does_not_compute_is_said(make: Make, tmp_path: Path) -> None:
    ran = pair(make(), write_tiny_mamba(tmp_path / "mamba.gguf"))
    assert (
        ran.code == 4 and "cannot be served: a mamba model keeps a state" in ran.out and "the same 512 ids" in ran.out
    )
    refusal = refused_gguf("gemma2")
    assert refusal is not None and not refusal.final and refused_gguf("llama") is None
    found = compare(read_gguf(make()), read_gguf(make()), refusal=refusal)
    assert found.fits and any("--backend transformers may serve its" in remark for remark in found.remarks)


def test_the_verdict_is_that_of_edge_and_cloud_when_they_meet() -> None:
    """Whatever the vocabularies: `pair` and the handshake agree."""
    texts = [b"a", b"", b"b", b"", b""]
    for own in (texts, texts[:3], [b"a", b"", b"c"], [b"a", b"x", b"b"], [b"a", b"", b"b", b"d"]):
        other = Vocabulary(tuple(texts))
        mine = Vocabulary(tuple(own))
        same = identity(mine).hash == identity(other).hash
        assert (differs(mine, other) is None) == same


def identity(vocabulary: Vocabulary) -> Identity:
    info = ModelInfo("m", vocabulary.size, 16, (), bytes(8), "cpu", "float32")
    return Identity(info, vocabulary)


# ---- acceptance


def test_a_model_accepts_itself_always(make: Make) -> None:
    found = report(pair(make(), make(), "--json", "--quiet", "--tokens", "20"))
    measured = found["acceptance"]
    assert (measured["greedy"], measured["sampled"], measured["mean_run"]) == (1.0, 1.0, 20.0)
    assert (measured["where"], measured["prompts"], measured["tokens"]) == ("edge", 3, 60)


def test_what_is_measured_is_what_a_slow_reading_gives(make: Make) -> None:
    """Against each model asked afresh behind every prefix."""
    import numpy as np

    from pipesd.edge.drafter import Drafter

    draft, target = read_gguf(make(noise=0.1)), read_gguf(make())
    sample = pair_sample.sample_here(draft, target, ["def f(x):"], 15, 1)
    models = [Drafter(facts.path, context=64) for facts in (target, draft)]
    ids = models[0].tokeniser.encode("def f(x):", special=True)
    right, shared = [], []
    for _ in range(15):
        rows = []
        for model in models:
            model.rollback(0)
            model.extend(ids)
            model.draft()
            weights = np.exp((model._logits().astype(float) - model._logits().max()) / 0.8)
            rows.append(weights / weights.sum())
        right.append(rows[0].argmax() == rows[1].argmax())
        shared.append(1 - abs(rows[0] - rows[1]).sum() / 2)
        ids.append(int(rows[0].argmax()))
    for model in models:
        model.close()
    assert 0 < sum(right) < 15, "a case that tells nothing"
    assert sample.greedy == pytest.approx(sum(right) / 15)
    assert sample.sampled == pytest.approx(sum(shared) / 15, abs=0.01)
    runs = "".join("x" if each else "." for each in right).split(".")
    assert sample.mean_run == pytest.approx(sum(map(len, runs)) / len(runs if runs[-1] else runs[:-1]))


def test_a_text_that_ends_is_measured_up_to_its_end(make: Make) -> None:
    from pipesd.edge.drafter import Drafter

    model = Drafter(make(), context=64)
    model.extend(model.tokeniser.encode("def f(x):", special=True))
    text = [model.draft().id for _ in range(12)]
    model.close()
    ends = read_gguf(make(eos_id=text[6]))
    sample = pair_sample.sample_here(ends, ends, ["def f(x):"], 12, 1)
    assert sample.tokens == text.index(text[6]) + 1


@pytest.mark.parametrize(
    ("accepted", "per_token", "rounds", "rejected"),
    [(7, 0.7, 5, 3), (2, 0.666667, 9, 1), (0, 0.0, 4, 4), (0, None, 3, 0)],
)
def test_first_rejections_of_a_generation(accepted: int, per_token: float | None, rounds: int, rejected: int) -> None:
    stats = {"accepted": accepted, "acceptance_per_token": per_token, "rounds": rounds}
    assert pair_sample.rejected(stats) == rejected


def test_too_little_memory_is_said_and_the_rest_stands(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pair_sample, "free_on_host", lambda: [Free(10**15, "this machine"), Free(1000, "this container")]
    )
    facts = read_gguf(make())
    with pytest.raises(pair_sample.NotMeasured, match=r"take about [\d.]+ MB, this container has 0.001 MB free"):
        pair_sample.sample_here(facts, facts, ["x"], 4, 1)
    ran = pair(make(), make())
    assert ran.code == 0 and "not measured" in ran.out and "give --cloud ADDRESS" in ran.out


@pytest.fixture(scope="module")
def scripted(make: Make) -> Iterator[Serving]:
    with serving(KeyedText(3), target={"vocabulary": read_gguf(make()).vocabulary, "context": 800}) as served:
        yield served


def test_at_a_cloud_real_generations_are_counted(make: Make, scripted: Serving) -> None:
    found = report(pair(make(), make(), *QUICK, "--cloud", scripted.address, "--json", "--quiet"))
    measured = found["acceptance"]
    assert (measured["where"], measured["tokens"], measured["sampled"], measured["longest"]) == ("cloud", 12, None, 4)
    assert 0 <= measured["greedy"] <= 1
    assert (measured["context"], found["context"]) == (800, 800) and measured["model"]
    ran = pair(make(), make(), *QUICK, "--cloud", scripted.address)
    assert (
        ran.code == 0
        and "at the cloud, which serves " in ran.out
        and "a text ends at 800, the cloud's" in ran.out
        and "prompt 1 of 1 at the cloud" in ran.err
    )


def test_a_cloud_that_serves_something_else(make: Make, scripted: Serving) -> None:
    swapped = make(swap=(300, 301))
    ran = pair(swapped, swapped, *QUICK, "--cloud", scripted.address, "--json", "--quiet")
    told = f"the cloud at {scripted.address} serves "
    assert ran.code == 2 and told in ran.complaint and ", not the target: its ids mean other texts" in ran.complaint
    found = report(ran)
    assert found["fits"] is True and told in found["error"] and told in found["not_measured"]


def test_no_cloud(make: Make) -> None:
    ran = pair(make(), make(), "--cloud", NOWHERE, "--connect-s", "0.3", "--json", "--quiet")
    assert ran.code == 3 and "nothing listens there" in ran.complaint
    found = report(ran)
    assert found["fits"] is True and found["error"] and found["acceptance"] is None


# ---- what is refused


@pytest.mark.parametrize("side", ["draft", "target"])
def test_files_that_are_no_model_are_one_line(make: Make, tmp_path: Path, side: str) -> None:
    good = make()
    for kind, (given, named) in bad_files(tmp_path, good.read_bytes()).items():
        ran = pair(*((given, good) if side == "draft" else (good, given)), "--json", "--quiet")  # type: ignore[arg-type]
        assert ran.code == 2 and named in ran.complaint, kind
        assert report(ran)["error"] and report(ran)["fits"] is None


@pytest.mark.parametrize(("prompt", "complaint"), [("", "a prompt is empty"), ("x" * 3000, "ids, the shorter context")])
def test_prompts_that_cannot_be(make: Make, prompt: str, complaint: str) -> None:
    ran = pair(make(), make(), "--prompt", prompt, "--quiet")
    assert ran.code == 2 and complaint in ran.complaint


def test_parts_of_a_model(make: Make, tmp_path: Path) -> None:
    parts = sorted(write_tiny(tmp_path / "m.gguf", split=9).parent.iterdir())
    facts, one = read_gguf(parts[0]), read_gguf(make())
    assert facts.parameters == one.parameters and facts.vocabulary == one.vocabulary
    assert facts.file_bytes == sum(part.stat().st_size for part in parts)
    more = estimate_bytes(facts.path, 64) - estimate_bytes(one.path, 64)
    assert more == facts.file_bytes - one.file_bytes, "memory for all parts"
    assert read_gguf(parts[2]) == facts, "any part stands for the model"
    ran = pair(parts[1], make(), *QUICK, "--quiet")
    assert ran.code == 0 and str(parts[0]) in ran.out and "both computed here" in ran.out
    parts[1].unlink()
    assert f"{parts[1]}: is missing, part 2 of 3 of a model" in pair(make(), parts[0]).complaint
    parts[1].write_bytes(parts[2].read_bytes())
    assert f"{parts[1]}: says that it is part 2 (from 0) of 3, 1 of 3 was wanted" in pair(make(), parts[0]).complaint


def test_a_name_cannot_steer_the_terminal(make: Make) -> None:
    ran = pair(make(name="red\x1b[31m\ngreen"), make(), "--tokens", "1", "--prompt", "x")
    assert ran.code == 0 and all(line.isprintable() for line in ran.out.splitlines())
    assert "red\\x1b[31m\\ngreen" in ran.out
    narrow = edge("pair", "--draft", make(), "--target", make(swap=(300, 301)), PYTHONIOENCODING="ascii")
    assert narrow.code == 4 and narrow.out.isascii()


def test_an_interrupted_sample(make: Make) -> None:
    options = ["--draft", make(context=8192), "--target", make(context=8192), "--tokens", "4096", "--json"]
    with Program("edge", "pair", *options) as program:
        since_s = program.says("loading both models", on="err").send(signal.SIGINT)
        ran = program.end(3.0, since_s=since_s)
    assert ran.code == 130 and report(ran)["error"] == "interrupted"


def test_a_tiny_cost_is_not_rounded_away() -> None:
    draft = dataclasses.replace(FACTS, weight_bytes=10**4, parameters=10**4, read_parameters=10**4)
    found = as_json(compare(draft, FACTS))
    assert found["cost_ratio_float32"] == pytest.approx(2.5e-6) and found["cost_ratio_16_bits"] == pytest.approx(5e-6)
    shown = describe(compare(draft, FACTS), ascii_only=True)
    assert "in float32 and 2 GB in 16 bits: 2.5e-06 and 5e-06 of a token of the target\n" in shown


def test_sizes_are_in_the_unit_that_fits() -> None:
    assert [size_text(number) for number in (500_000, 98_300_000, 157_048_000_000)] == ["0.5 MB", "98.3 MB", "157 GB"]
    assert [counted(number, "thread") for number in (1, 2)] == ["1 thread", "2 threads"]


def test_sizes_count_what_a_token_reads(make: Make) -> None:
    """A table of embeddings is read by rows, unless it is the output layer too."""
    untied, tied = read_gguf(make()), read_gguf(make(tied=True))
    assert untied.parameters - untied.read_parameters == 512 * 64
    assert tied.parameters == tied.read_parameters
    assert untied.read_bytes == pytest.approx(4 * untied.read_parameters, rel=0.01)
    assert compare(dataclasses.replace(untied, context=0), untied).fits
    assert isinstance(untied, ModelFacts)
