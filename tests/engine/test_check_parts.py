# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Parts of the check of a user's model that need no engine."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import check_model
import numpy as np
import pytest
import torch
from harness import ROOT
from quickstart import is_right
from tasks import PASSKEY_FILLER
from transformers import AutoTokenizer
from turbo_check.advice import advise, gain_of_layer, layers_to_skip, loses_needles
from turbo_check.args import build_parser, complete
from turbo_check.cases import CUE, Plan, build_cases
from turbo_check.metrics import compare_needles, compare_records, rank_layers
from turbo_process.arm import read_result, run_arm
from turbo_quality.metrics import compare
from turbo_seeded.checkpoints import KINDS, write_checkpoint

from vllm import SamplingParams

MODEL = ROOT / "models" / "needle-qwen3"
HELD_OUT = ROOT / "tests" / "quality" / "heldout.txt"
BIG = 150_000
# The error of the logarithm of an fp32 sum of BIG numbers. Each addition rounds by
# 2**-24 at most, and roundings add up as their number's root. In AVX2's order the error
# is a seventh of this.
SUM_ERROR = 4 * BIG**0.5 * 2.0**-24


def row(arm: str, kl: float = 0.001, **fields: Any) -> dict[str, Any]:
    needles = {"cases": 60, "found": 60, "lost": 0, "gained": 0}
    made = {"arm": arm, "cache_dtype": arm, "kl_mean": kl, "top1": 0.99}
    made["bytes_per_token"] = {"auto": 512, "fp8": 256}.get(arm, 136)
    return made | {"needles": needles} | fields


def needles(lost: int, gained: int = 0, cases: int = 60) -> dict[str, int]:
    found = cases - lost
    return {"cases": cases, "found": found, "lost": lost, "gained": gained}


AUTO = row("auto", 0.0)
WITHOUT_FP8 = "with fp8 in --kv-cache-dtype others are compared with it"


def test_without_fp8_figures_stand_alone():
    failed = {"arm": "fp8", "cache_dtype": "fp8", "error": "no"}
    said = "turbo4: KL 20.10 millinats, top token differs at 1.0%"
    rows = [AUTO, row("turbo4", 0.0201)]
    assert advise(rows) == f"{said}; {WITHOUT_FP8}"
    assert advise([*rows, failed]) == f"{said}; fp8: not measured"


@pytest.mark.parametrize(
    ("kl", "fp8", "words"),
    [
        # A real model's: 135 M parameters, a window, contexts of 512 to 8192.
        (0.0064, 0.0210, "closer than fp8 (KL 0.30 times fp8's"),
        (0.0079, 0.0100, "closer than fp8 (KL 0.79"),
        (0.0081, 0.0100, "as close as fp8 (KL 0.81"),
        (0.0124, 0.0100, "as close as fp8 (KL 1.24"),
        (0.0126, 0.0100, "farther than fp8 (KL 1.26"),
        (0.0049, 0.0001, "farther than fp8 by little, 4.90 millinats in all (KL 49"),
        (0.0051, 0.0001, "farther than fp8 (KL 51.00"),
        (0.0010, 0.0, "farther than fp8 by little, 1.00 millinats"),
    ],
)
def test_dtypes_are_compared_with_fp8(kl: float, fp8: float, words: str):
    """This does not depend on fp8's own figures, which are not judged."""
    said = advise([AUTO, row("turbo4", kl, top1=0.955), row("fp8", fp8, top1=0.923)])
    turbo4, measure = said.split("; ")
    assert turbo4.startswith(f"turbo4: {words}")
    assert turbo4.endswith(
        "top token differs at 4.5%, fp8's at 7.7%), at 53% of its bytes"
    )
    expected = (
        f"fp8: the measure, KL {1000 * fp8:.2f} millinats, top token differs at 7.7%"
    )
    assert measure == expected


@pytest.mark.parametrize(
    ("lost", "gained", "is_loss"),
    [(0, 0, False), (3, 0, False), (4, 0, True), (4, 3, False), (0, 9, False),
     (9, 2, True)],
)  # fmt: skip
def test_needles_are_lost_beyond_chance(lost: int, gained: int, is_loss: bool):
    assert loses_needles(needles(lost, gained)) == is_loss
    said = advise([AUTO, row("k4v3", needles=needles(lost, gained))])
    assert (f", but {lost} of 60 needles are lost;" in said) == is_loss


@pytest.mark.parametrize(("found", "says"), [(30, True), (29, False)])
def test_needles_say_nothing_if_the_reference_finds_few(found: int, says: bool):
    reference = row("auto", needles=needles(60 - found))
    said = advise([reference, row("turbo4", needles=needles(20))])
    assert (", but 20 of 60 needles are lost" in said) == says
    silent = "; needles say nothing, for the reference finds 29 of 60"
    assert said.endswith(silent) != says


def test_a_window_is_named():
    rows = [AUTO, row("turbo4", window_layers=8), row("k4v3", window_layers=0)]
    first, second, _ = advise(rows).split("; ")
    assert first.startswith("turbo4 with window: ") and second.startswith("k4v3: ")


def test_noise_and_layers_are_not_judged():
    again = row("auto, again") | {"cache_dtype": "auto"}
    skipping = row("turbo4", 9.0, skip_layers=["3"])
    assert advise([AUTO, again, skipping]) == "nothing to advise on"


def test_layers_are_worth_their_bytes_beyond_two_equal_parts():
    packed = row("turbo4", 1.0, layers=10, kl_texts=[1.0, 1.0])

    def skipping(layer: str, *texts: float) -> dict[str, Any]:
        mean = float(np.mean(texts))
        return row("turbo4", mean, skip_layers=[layer], kl_texts=[*texts])

    rows = [skipping("1", 0.79, 0.79), skipping("2", 0.81, 0.81)]
    # This one gains more on average, but by chance.
    rows += [skipping("3", 0.4, 1.1), {"arm": "x", "skip_layers": ["4"], "error": "no"}]
    assert layers_to_skip(rows, packed) == ["1"]


def test_the_standard_error_of_a_gain_is_of_the_mean_of_texts():
    packed = row("turbo4", kl_texts=[5.0, 5.0, 5.0, 5.0])
    layer = row("turbo4", kl_texts=[4.0, 3.0, 2.0, 1.0])
    # Deviations of 1.5 and 0.5 to both sides: a variance of 5 / 3.
    assert gain_of_layer(layer, packed) == pytest.approx((2.5, (5 / 3 / 4) ** 0.5))
    only = row("turbo4", kl_texts=[1.0])
    assert gain_of_layer(only, row("turbo4", kl_texts=[2.0])) == (1.0, None)


@pytest.mark.parametrize(("spread", "is_worth"), [(0.42, True), (0.44, False)])
def test_noise_advises_no_layer(spread: float, is_worth: bool):
    """The mean gain of four texts is 0.5. Twice its error is 0.5 at a spread of 0.433.

    The sample's deviation is the spread times the root of 4 / 3.
    """
    packed = row("turbo4", 1.0, layers=10, kl_texts=[1.0] * 4)
    texts = [0.5 + sign * spread for sign in (1, -1, 1, -1)]
    layer = row("turbo4", 0.5, skip_layers=["7"], kl_texts=texts)
    assert layers_to_skip([layer], packed) == (["7"] if is_worth else [])


def records(full: np.ndarray, ids: np.ndarray, targets: np.ndarray) -> dict[str, Any]:
    """Returns the records of distributions (text, position, token)."""
    kept = np.take_along_axis(full, ids, -1)
    others = full.copy()
    np.put_along_axis(others, ids, -np.inf, -1)
    with np.errstate(divide="ignore"):
        rest = np.log(np.exp(others).sum(-1, keepdims=True))
    target = np.take_along_axis(full, targets[..., None], -1)[..., 0]
    logprobs = np.concatenate([kept, rest], -1)
    return {"logprobs": logprobs, "target": target, "top": full.argmax(-1)}


@pytest.mark.parametrize(("k", "is_whole"), [(40, True), (39, True), (8, False)])
def test_kl_of_some_tokens_is_a_lower_bound(k: int, is_whole: bool):
    """KL is exact if all tokens are told apart, or all but one."""
    noise = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(2, 30, 40, generator=noise, dtype=torch.float64)
    moved = logits + 0.3 * torch.randn(logits.shape, generator=noise).double()
    full = [x.log_softmax(-1).numpy() for x in (logits, moved)]
    targets = full[0].argmin(-1)
    ids = np.argsort(-full[0], -1)[..., :k]
    found = compare_records(*(records(x, ids, targets) for x in full))
    expected = compare(*full, targets)
    for name in ("top1", "perplexity", "positions"):
        assert found[name] == pytest.approx(expected[name])
    before = compare(full[0], full[0], targets)["perplexity"]
    change = expected["perplexity"] / before - 1
    assert found["perplexity_change"] == pytest.approx(change)
    for name in ("kl_mean", "kl_p99", "kl_stderr"):
        if is_whole:
            assert found[name] == pytest.approx(expected[name])
    if not is_whole:
        assert 0.5 * expected["kl_mean"] < found["kl_mean"] < expected["kl_mean"]


def test_what_is_common_to_all_outcomes_is_no_divergence():
    logprobs = np.log([[[0.7, 0.2, 0.1]]])
    one = {"logprobs": logprobs, "target": np.zeros((1, 1)), "top": np.zeros((1, 1))}
    found = compare_records(one, one | {"logprobs": logprobs - 1e-5})
    assert found["kl_mean"] == pytest.approx(0, abs=1e-12)


def test_needles_are_compared_in_pairs():
    cases = [{"context": 512, "depth": depth} for depth in (0.0, 0.5, 1.0, 0.7)]
    answers = [True, True, False, False], [True, False, True, False]
    found = compare_needles(cases, *answers)
    assert found["lost_at"] == [{"context": 512, "depth": 0.5}]
    assert (found["found"], found["lost"], found["gained"]) == (2, 1, 1)


def test_layers_are_ranked_by_what_their_k_does_to_scores():
    def layer(mean: list[float], score: float) -> dict[str, list[float]]:
        one = dict.fromkeys(("k_deviation", "v_deviation", "v_mean"), [2.0, 2.0])
        return one | {"k_mean": mean, "k_left": mean, "score": [score, score]}

    keys = {"model.layers.3.attn": layer([4.0, 8.0], 1), "x": layer([2.0, 1.0], 2)}
    first, second = rank_layers(keys)
    assert (first["layer"], second["layer"]) == ("x", "3")
    assert (second["head"], second["ratio"]) == (1, 4.0)


class FakeTokenizer:
    """A token a word, behind a first token as many models have it."""

    chat_template = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [len(word) for word in text.split()]


@pytest.mark.parametrize("passkeys", [False, True])
def test_cases_fit_their_contexts(passkeys: bool):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    plan = Plan(640, texts=2, cases=1, depths=(0.0, 1.0), passkeys=passkeys)
    cases = build_cases(HELD_OUT.read_text(encoding="utf-8"), plan, tokenizer, 0)
    assert [text["context"] for text in cases.texts] == [512, 512, 640, 640]
    assert all(len(text["tokens"]) == text["context"] for text in cases.texts)
    for needle in cases.needles:
        length = len(needle["prompt"]) + plan.answer_tokens
        assert 0.9 * needle["context"] < length <= needle["context"]
        prompt = tokenizer.decode(needle["prompt"])
        assert is_right(prompt, needle["answer"])
        assert prompt.endswith("<|im_start|>assistant\n")
        lines = [x for x in prompt.split("\n") if needle["answer"] in x]
        place = prompt.index(needle["answer"]) / len(prompt)
        assert len(lines) == 1 and (place > 0.5) == (needle["depth"] == 1.0)
        assert (prompt.count(PASSKEY_FILLER) > 1) == passkeys


def test_cases_without_a_chat_template():
    """A text has the tokenizer's first token, and has it once."""
    plan = Plan(max_context=600, texts=1, cases=1, depths=(0.5,))
    text = HELD_OUT.read_text(encoding="utf-8")
    cases = build_cases(text, plan, FakeTokenizer(), 0)
    for text in cases.texts:
        assert text["tokens"].index(0) == 0 and text["tokens"].count(0) == 1
        assert len(text["tokens"]) == text["context"]
    expected = [len(word) for word in CUE.split()]
    assert cases.needles[0]["prompt"][-len(expected) :] == expected
    with pytest.raises(ValueError, match="too few for a context of 9999999"):
        build_cases("a text", replace(plan, max_context=9999999), FakeTokenizer(), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([str(MODEL), "--kv-cache-dtype", "turbo5"], "turbo5 is no KV cache dtype"),
        ([str(MODEL), "--kv-cache-dtype", "fp8:no-window"], "fp8:no-window is no arm"),
        ([str(MODEL), "--kv-cache-dtype", "auto:no-means"], "auto:no-means is no arm"),
        ([str(MODEL), "--kv-cache-dtype", "turbo4:long"], "turbo4:long is no arm"),
        ([str(MODEL), "--kv-cache-dtype", "turbo4:all"], "turbo4:all is no arm"),
        ([str(MODEL), "--kv-cache-dtype", "auto:0"], "auto:0 is no arm"),
        (
            [str(MODEL), "--gsm8k", "--kv-cache-dtype", "turboquant_4bit_nc:all"],
            "not turboquant_4bit_nc:all: leave out",
        ),
        ([str(MODEL), "--max-context", "9000"], "longer than the model's, 8192"),
        ([str(MODEL), "--max-context", "100"], "--max-context is 100, shorter than"),
        ([str(MODEL), "--texts", "0"], "--texts has to be positive, and is 0"),
        ([str(MODEL), "--jobs", "0"], "--jobs has to be positive, and is 0"),
        ([str(MODEL), "--text", "/no/such"], "--text /no/such"),
        ([str(MODEL), "--text", __file__, "--max-context", "8192"], None),
        ([str(MODEL), "--text", "SHORT"], "the text has 8 tokens, too few"),
        ([str(MODEL), "--engine-args", "[]"], "--engine-args"),
        ([str(MODEL), "--engine-args", '{"no": 1}'], "'no'"),
        ([str(MODEL), "--gsm8k"], "pip install lm-eval"),
    ],
)
def test_bad_input_is_named_before_engines_start(
    options: list[str],
    message: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    class Started(Exception):
        pass

    def start(*_: Any) -> None:
        raise Started

    monkeypatch.setattr(check_model, "check", start)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    (tmp_path / "short").write_text("a text.\n")
    words = [str(tmp_path / "short") if word == "SHORT" else word for word in options]
    words += ["--output", str(tmp_path / "output")]
    expected = SystemExit if message else Started
    with pytest.raises(expected) as raised:
        check_model.main(words)
    if message:
        assert raised.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", [None, "cache", "modelopt-fp8"])
def test_the_reference_is_not_quantised(kind: str | None, tmp_path: Path):
    """It is not, even if the checkpoint has a scheme, which auto would follow."""
    folder = str(MODEL)
    if kind is not None:
        folder = write_checkpoint(MODEL, tmp_path / kind, KINDS[kind])
    args = build_parser("").parse_args([folder, "--output", str(tmp_path / "output")])
    complete(args)
    found = {
        name: check_model.engine_args(check_model.arm_of(name), args)["kv_cache_dtype"]
        for name in ("auto", "turbo4")
    }
    assert found == {"auto": "float16" if kind else "auto", "turbo4": "turbo4"}


def test_options_of_arms(tmp_path: Path):
    """The engine of an arm gets its chunk, and its child is told what to override."""

    class Asked(check_model.Checks):
        def __init__(self) -> None:
            self.args, self.scratch = args, tmp_path
            self.cases, self.reference = SimpleNamespace(for_child=dict), arms[0]

        def run_child(self, child: Path, job: dict[str, Any], folder: Path) -> None:
            jobs.append(job)

    jobs: list[dict[str, Any]] = []
    args = build_parser("").parse_args([str(MODEL), "--output", str(tmp_path / "x")])
    complete(args)
    names = ["auto", "auto:512", "turboquant_4bit_nc", "turboquant_4bit_nc:all",
        "turbo4", "turbo4:no-window", "turbo4:no-means"]  # fmt: skip
    arms = check_model.arms_of(names)
    assert [arm.name for arm in arms] == ["auto", "auto, again",
        "auto in chunks of 512", *names[2:]]  # fmt: skip
    for arm in arms:
        Asked().run_arm(arm)
    chunks = [job["engine_args"]["max_num_batched_tokens"] for job in jobs]
    assert chunks == [2048, 2048, 512] + [2048] * 5
    assert [job["compress_all_layers"] for job in jobs] == [i == 4 for i in range(8)]
    assert [job["reference"] is None for job in jobs] == [i == 0 for i in range(8)]
    attention = [job["engine_args"].get("attention_config", {}) for job in jobs]
    assert attention == [{}] * 6 + [{"turbo_window": 0}, {"turbo_means": "off"}]


@pytest.mark.parametrize(("error", "status"), [({}, 0), ({"error": "no"}, 1)])
def test_status_is_of_engines_and_not_of_advice(
    error: dict[str, str],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    report = {"arms": [row("turbo4", 9.0) | error], "layers": None}
    monkeypatch.setattr(check_model, "check", lambda *_: report)
    monkeypatch.setattr(check_model, "write_report", lambda *_: None)
    options = [str(MODEL), "--max-context", "512", "--output", str(tmp_path)]
    assert check_model.main(options) == status


def test_gsm8k_is_asked_as_vllm_asks_it(tmp_path: Path):
    """A stand-in for lm_eval notes the arguments that it gets."""
    (tmp_path / "lm_eval.py").write_text(
        "import json, pathlib\n"
        "def simple_evaluate(**asked):\n"
        "    pathlib.Path(__file__).with_name('asked').write_text(json.dumps(asked))\n"
        "    scores = {'exact_match,strict-match': 0.75,\n"
        "              'exact_match_stderr,strict-match': 0.01}\n"
        "    return {'results': {'gsm8k': scores}}\n"
    )
    job = {"model": "m", "engine_args": {"kv_cache_dtype": "turbo4"}, "limit": 7}
    variables = {"PYTHONPATH": str(tmp_path)}
    folder = tmp_path / "arm"
    assert run_arm(check_model.GSM8K_CHILD, job, folder, variables, 60, False) is None
    assert read_result(folder) == {"score": 0.75, "stderr": 0.01}
    asked = json.loads((tmp_path / "asked").read_text())
    assert asked["model"] == "vllm" and asked["num_fewshot"] == 5
    assert asked["tasks"] == ["gsm8k"] and asked["limit"] == 7
    assert asked["model_args"] == {"pretrained": "m", "kv_cache_dtype": "turbo4"}


def test_big_vocabularies_are_reduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """There are two requests, one of which is in a chunk of its prompt at first."""
    from turbo_check import probe

    monkeypatch.setattr(probe, "get_tensor_model_parallel_rank", lambda: 0)
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(3, 2, BIG, generator=generator)
    k, first, steps = 64, 9, 2
    arms = {"reference": logits, "other": logits + 0.1}
    arms["other"][..., ::2] -= 0.3
    for name, of_arm in arms.items():
        recorder = probe.Recorder(None, None)  # type: ignore[arg-type]
        assert not recorder.add_request(5, SamplingParams())
        for slot in (3, 7):
            path = tmp_path / f"{name}-{slot}.npz"
            reference = tmp_path / f"reference-{slot}.npz"
            watch = {"path": str(path), "first": first, "count": k}
            watch["reference"] = str(reference) if name == "other" else None
            params = SamplingParams(extra_args={probe.WATCH: watch})
            params.trace_decode_token_ids = [11, 22]
            assert recorder.add_request(slot, params)
        for step in range(3):
            # One request is a step behind the other, and in another row each time.
            order = [0, 1] if step % 2 else [1, 0]
            at = np.array([first + step, first + step - 1])
            context = SimpleNamespace(
                pos=torch.from_numpy(at[order]), idx_mapping_np=np.array([3, 7])[order]
            )
            before = of_arm[step][order]
            assert torch.equal(recorder.apply(before.clone(), context), before)
        assert not recorder.records
    for index, slot in enumerate((3, 7)):
        found = {n: np.load(tmp_path / f"{n}-{slot}.npz") for n in arms}
        mine = {n: x[index : index + steps, index] for n, x in arms.items()}
        full = {n: x.double().log_softmax(-1).numpy() for n, x in mine.items()}
        ids = np.argsort(-full["reference"], -1)[:, :k]
        assert (found["reference"]["ids"] == ids).all()
        for name, x in full.items():
            expected = records(x, ids, np.array([11, 22]))
            assert (found[name]["top"] == expected["top"]).all()
            off = found[name]["logprobs"] - expected["logprobs"]
            # The sum over all outcomes is in fp32, in the order of the CPU's vectors.
            # Its error moves all log-probabilities alike. The rest has its own sum.
            shift = off.mean(-1)
            assert max(np.abs(shift).max(), np.abs(off[..., -1]).max()) <= SUM_ERROR
            assert np.abs(off[..., :-1] - shift[..., None]).max() <= 2e-6
            off = found[name]["target"] - expected["target"] - shift
            assert np.abs(off).max() <= 2e-6
