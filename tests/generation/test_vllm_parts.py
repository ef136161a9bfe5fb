"""Parts of the vLLM generators that need no vLLM."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lit_rl.core import ranks
from lit_rl.core.errors import BackendError, GenerationError, NumericError
from lit_rl.core.rollout import Prompts, Sampling
from lit_rl.generation.vllm import in_process, launch, transports
from lit_rl.generation.vllm import transports as host
from lit_rl.generation.vllm.client import ServerRefused
from lit_rl.generation.vllm.engine import EngineAnswer, Facts, completions_of, requests_of
from lit_rl.generation.vllm.engine_generator import EngineGenerator, ProgressLine
from lit_rl.generation.vllm.engine_settings import EngineSettings
from lit_rl.generation.vllm.server import VLLMServerGenerator
from lit_rl.generation.vllm.weight_probe import VISIBLE, ProbeAnswers, WeightProbe
from lit_rl.models import LanguageModel, Lora

PROMPTS = Prompts(token_ids=[[1, 2, 3], [4]], keys=[-1, 2**63 - 1], group_size=2, eos_ids=(9,), pad_id=0)
FACTS = Facts("a", None, {}, "float32", 64, 16, "processed_logprobs", 256, None, "cpu")


def test_weights_travel_in_chunks_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many bytes at once, but never less than a tensor; nothing is left out."""
    monkeypatch.setattr(transports, "CHUNK_BYTES", 100)
    named = [(str(size), torch.zeros(size, dtype=torch.uint8)) for size in (60, 40, 1, 300, 5, 5)]
    cut = [[name for name, _ in chunk] for chunk in transports.chunks(iter(named))]
    assert cut == [["60", "40"], ["1"], ["300"], ["5", "5"]]
    assert list(transports.chunks(iter(()))) == []


def test_what_a_killed_process_left_in_memory_is_removed_and_what_is_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody holds was left; it is not so long until it may be told from one that is being made."""
    (tmp_path / "w_left").mkdir()
    (tmp_path / "w_left" / "0.safetensors").touch()
    with host.memory_folder("w_", str(tmp_path)) as used:
        assert {*tmp_path.iterdir()} == {used, tmp_path / "w_left"}
        monkeypatch.setattr(host, "_YOUNG", -1.0)
        with host.memory_folder("w_", str(tmp_path)) as mine:
            assert {*tmp_path.iterdir()} == {used, mine}
    assert not [*tmp_path.iterdir()]


def test_the_heartbeat_says_how_far_it_is_and_not_too_often(capsys: pytest.CaptureFixture[str]) -> None:
    beat = ProgressLine(3600)
    beat(1, 8)
    assert capsys.readouterr().out == ""
    beat._last -= 4000
    beat(3, 8)
    beat(4, 8)
    assert capsys.readouterr().out == "generating: 3 of 8 completions\n"
    silent = ProgressLine(None)
    silent._last -= 4000
    silent(3, 8)
    assert capsys.readouterr().out == ""


def test_requests_name_every_field_and_a_seed_that_vllm_takes() -> None:
    sampling = Sampling(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_new_tokens=7, stop=("x",), logit_bias={3: 1}
    )
    first, second = requests_of(PROMPTS, sampling)
    assert first.token_ids == [1, 2, 3] and first.completions == 2
    assert {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_tokens": 7}.items() <= first.fields.items()
    assert first.fields["stop_token_ids"] == [9] and first.fields["ignore_eos"] is True
    assert first.fields["logit_bias"] == {"3": 1.0}
    assert all(0 <= request.fields["seed"] < 2**62 for request in (first, second))
    assert first.fields["seed"] == second.fields["seed"] == 2**62 - 1, "keys that differ above the 62nd bit alone"
    greedy = requests_of(PROMPTS, Sampling(temperature=0, top_p=0.5, max_new_tokens=7))[0]
    assert greedy.completions == 1 and greedy.fields["top_p"] == 1.0, "greedy decoding cuts nothing"


def test_answers_become_rows_and_what_is_missing_is_an_error() -> None:
    answers = [[EngineAnswer([5, 9], [-1.0, -0.5], True), EngineAnswer([6], [-2.0], False)]] * 2
    out = completions_of(PROMPTS, answers, version=4, device=torch.device("cpu"))
    assert out.response_ids.tolist() == [[5, 9], [6, 0], [5, 9], [6, 0]]
    assert out.response_mask.tolist() == [[True, True], [True, False]] * 2
    assert out.sampler_logprobs.tolist() == [[-1.0, -0.5], [-2.0, 0.0]] * 2
    assert out.ended.tolist() == [True, False] * 2 and out.version == 4
    with pytest.raises(GenerationError, match="1 completions of prompt 1"):
        completions_of(PROMPTS, [answers[0], answers[0][:1]], version=0, device=torch.device("cpu"))
    for broken in (EngineAnswer([], [], True), EngineAnswer([5, 9], [-1.0], True)):
        with pytest.raises(GenerationError, match="Completion 0"):
            completions_of(PROMPTS, [[broken, broken]] * 2, version=0, device=torch.device("cpu"))
    nan = EngineAnswer([5], [float("nan")], True)
    with pytest.raises(NumericError, match="NaN"):
        completions_of(PROMPTS, [[nan, nan]] * 2, version=0, device=torch.device("cpu"))


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_completions_are_told_as_their_group_is_done(temperature: float) -> None:
    told: list[tuple[int, list[int]]] = []
    generator: EngineGenerator = VLLMServerGenerator(urls=["http://127.0.0.1:1"])
    generator.facts, generator._policy = FACTS, torch.nn.Linear(1, 1)
    asked = replace(PROMPTS, on_finished=lambda row, ids: told.append((row, ids)))
    work = generator._work(asked, Sampling(temperature=temperature, max_new_tokens=4))
    for number, request in reversed(work.requests(wait=True)):
        work.done(number, [EngineAnswer([5 + number, 6 + i], [-1.0] * 2, True) for i in range(request.completions)])
    second = 7 if temperature else 6  # a greedy answer stands for its whole group
    assert told == [(2, [6, 6]), (3, [6, second]), (0, [5, 6]), (1, [5, second])]


@pytest.mark.parametrize(
    ("device", "rank", "environment", "local"),
    [
        ("cuda:0", 0, {}, "0"),
        ("cuda:1", 0, {}, "1"),  # trainer.devices=[1]
        ("cuda:3", 1, {"LOCAL_RANK": "1"}, "3"),  # trainer.devices=[2,3], by Lightning's own launcher
        ("cuda:1", 5, {"SLURM_LOCALID": "1"}, "1"),  # the second node of four GPUs
        ("cuda:0", 5, {"LOCAL_RANK": "1"}, "0"),  # a launcher that shows each rank its own GPU alone
        ("cpu", 5, {"LOCAL_RANK": "1"}, "1"),
        ("cpu", 5, {"SLURM_LOCALID": "1"}, "1"),
        ("cpu", 1, {}, "1"),
    ],
)
def test_an_engine_of_a_rank_is_on_the_gpu_of_its_policy(
    device: str, rank: int, environment: dict[str, str], local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_LOCALID", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(in_process.ranks, "rank", lambda: rank)
    monkeypatch.setattr(in_process.ranks, "world_size", lambda: 8)
    told = in_process.launcher_environment(torch.device(device))
    assert told["LOCAL_RANK"] == local and (told["RANK"], told["WORLD_SIZE"]) == (str(rank), "8")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert not {"RANK", "MASTER_PORT"} & in_process.launcher_environment(torch.device(device)).keys(), (
        "the launcher's stay"
    )


@pytest.mark.parametrize(
    ("kind", "url", "device", "transport"),
    [
        ("auto", "http://127.0.0.1:1", "cuda", transports.SharedMemory),
        ("auto", "http://192.0.2.1:1", "cuda", transports.NCCL),
        ("auto", "http://192.0.2.1:1", "cpu", transports.Gloo),  # of a machine with a GPU too
        ("nccl", "http://192.0.2.1:1", "cuda", transports.NCCL),
    ],
)
def test_weights_travel_by_nccl_where_the_policy_is_on_a_gpu(
    kind: str, url: str, device: str, transport: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    clients = [transports.Client(url)]
    assert type(transports.transport_for(kind, clients, 1.0, torch.device(device))) is transport
    with pytest.raises(BackendError, match="nccl sends from GPU to GPU, and the policy is on cpu"):
        transports.transport_for("nccl", clients, 1.0, torch.device("cpu"))


@pytest.mark.parametrize(
    ("device", "size", "said"),
    [
        ("cuda:0", 1, "the first visible GPU, beside the training (generator.gpu_memory_utilization=0.3"),
        ("cuda:1", 1, "the first visible GPU"),
        ("cuda:1", 2, "the first 2 visible GPUs, beside the training"),
        ("cpu", 1, "the first visible GPU"),
    ],
)
def test_a_launched_server_says_which_gpu_it_takes(device: str, size: int, said: str) -> None:
    line = launch.describe_gpus(torch.device(device), EngineSettings(tensor_parallel_size=size))
    assert line.startswith(said) and ("beside" in line) == ("beside" in said) == ("generator.urls" in line)


def test_lengths_and_temperatures_are_checked_before_there_is_an_engine() -> None:
    generator: EngineGenerator = VLLMServerGenerator(urls=["http://127.0.0.1:1"], max_model_len=100)
    generator.check(Sampling(max_new_tokens=40), 60)


def test_together_alone_is_the_work_itself() -> None:
    assert ranks.run_on_all_ranks(lambda: 3) == 3
    with pytest.raises(ServerRefused):
        ranks.run_on_all_ranks(lambda: (_ for _ in ()).throw(ServerRefused("u", "c", "w", 500)))
    with pytest.raises(ZeroDivisionError):
        ranks.run_on_all_ranks(lambda: 1 / 0)


def test_only_the_marked_thread_is_beside_the_training() -> None:
    seen: list[bool] = []

    def work() -> None:
        seen.append(ranks.in_background_thread())
        with ranks.background_thread():
            seen.append(ranks.in_background_thread())
        seen.append(ranks.in_background_thread())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, True, False] and not ranks.in_background_thread()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_that_the_engine_drops_is_noticed_from_the_documented_move_on(dtype: str) -> None:
    """An engine may ignore an adapter on one kind of layer, without an error: here on `up_proj` of one layer."""
    model = LanguageModel("tiny", lora=Lora(r=2, targets=["layers.1.mlp.up_proj"]))
    policy, probe = model.load(), WeightProbe(model.tokenizer, mean_limit=9, max_limit=9)  # not by its distance
    ids = probe._prompt(FACTS)
    (up,) = [parameter for name, parameter in policy.named_parameters() if "lora_B" in name]

    def after(version: int, size: float) -> float:
        """The policy's adapter is of this size, the engine's is the first one; how far the policy is from it."""
        with torch.no_grad():
            up.fill_(size)
        asked = ProbeAnswers(ids, first, [], dtype)
        gap = replace(probe.compare(asked, policy), dtype=dtype)
        probe.judge(asked, gap, version)
        return gap.max

    probe.compare(ProbeAnswers(ids, torch.zeros(32), [], dtype), policy)
    first = probe._ours.clone()
    after(1, 0.0)
    size, moved = 1e-7, 0.0
    with pytest.raises(GenerationError, match="the update had no effect") as raised:
        while size < 10:  # small steps add up
            size *= 1.2
            moved = after(2, size)
    noticed = float(str(raised.value).split("by ")[1].split(" nats")[0])
    assert moved <= VISIBLE[dtype] <= noticed < 1.5 * VISIBLE[dtype]  # what is said is rounded
    said = " ".join((Path(__file__).parents[2] / "docs" / "generators.md").read_text().split())
    assert f"{VISIBLE['float32']:.4f} nats in float32, {VISIBLE['bfloat16']:g} in bfloat16" in said
