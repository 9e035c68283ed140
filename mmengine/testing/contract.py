"""A test suite for model plugins. A plugin's package subclasses `PluginContract`:

    class TestMine(PluginContract):
        plugin = my_package.plugin
        refused = {"text_config.hidden_act": "relu"}

        def make_checkpoint(self, folder): ...

The tests run a tiny random checkpoint in an engine, and compare prompts, log-probabilities and tokens with
transformers'. They also check that the plugin refuses unsupported configs. Requires pytest and transformers.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmengine.config import EngineConfig
from mmengine.errors import ModelError
from mmengine.models.plugin import ModelPlugin, Processor
from mmengine.models.registry import plugin_for
from mmengine.replay import verify
from mmengine.request import MAX_LOGPROBS
from mmengine.serve.engine.engine import Engine
from mmengine.serve.text.request_output import Completion
from mmengine.testing.near_ties import near_experts, routers, steps_below

Chat = list[dict[str, object]]
# Inputs of a transformers model for a prompt: input_ids [1, n], attention_mask and others.
Inputs = dict[str, Tensor]
NUM_NEW = 16  # Tokens per answer.
TOLERANCE = 2e-4  # Largest allowed difference of float32 log-probabilities.
# Maximum number of attempts to make the engine preempt a row. An attempt fails if rows do not run at the same
# time, for example because an image is ready late.
MOST_ROUNDS = 8
NEAR_STEPS = 8  # Logits within this many bfloat16 steps are near ties.
MOST_NEAR_EXPERTS = 0.5  # Maximum share of tokens with nearly tied experts.
SETTINGS: dict[str, dict[str, object]] = {
    "one by one": {"max_num_seqs": 1, "enable_prefix_caching": False},
    "beside others": {"enable_prefix_caching": False},
    "in chunks": {"block_size": 4, "token_budget": 8, "max_num_seqs": 4, "enable_prefix_caching": False},
    "from the cache": {"block_size": 4},
    "preempted": {"block_size": 4, "enable_prefix_caching": False},
    "drafted": {"spec": "suffix", "draft_policy": "all"},
}
CHATS: tuple[Chat, ...] = tuple(
    [{"role": "user", "content": text}]
    for text in ("What is the time?", "Hello", "Two cats sat on a mat, and one of them slept.", "1 + 2 = ?")
)
NO_TORCH = (
    "import sys, pathlib; from mmengine.models.registry import plugin_for; p = pathlib.Path(sys.argv[1]); "
    "plugin_for(p).load_processor(p).prepare([{'role': 'user', 'content': 'a'}]); "
    "sys.exit('torch' in sys.modules)"
)


class Logits(Protocol):
    logits: Tensor  # [1, n, vocab].


class Reference(Protocol):
    """A transformers model."""

    def __call__(self, **inputs: Tensor) -> Logits: ...

    def generate(self, **inputs: object) -> Tensor: ...

    @classmethod
    def from_pretrained(cls, folder: Path, *, dtype: torch.dtype) -> "Reference": ...


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with transformers' inputs and greedy tokens for each chat."""

    folder: Path
    reference: Reference
    inputs: list[Inputs]
    tokens: list[list[int]]


def make_lively(model: torch.nn.Module, seed: int = 0) -> None:
    """Replace every parameter by random values, so that the model generates varied tokens. A freshly
    initialised model repeats a single token. All its norm weights are one and all biases zero, so tests would
    not notice swapped tensors.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            if weight.ndim > 1 and "embed" not in name:
                # The weights of one output unit. An expert tensor's first dimension is the expert.
                one = weight[0, 0] if "experts." in name and weight.ndim > 2 else weight[0]
                weight.copy_(drawn / one.numel() ** 0.5)
            elif "norm" in name and not name.endswith("bias"):
                weight.copy_(1 + 0.3 * drawn)
            else:
                weight.copy_(0.25 * drawn)  # Small, because a tied embedding scales the logits.


def with_field(text: str, field: str, value: object) -> str:
    """Return the JSON object `text` with `value` at the dotted path `field`."""
    whole = json.loads(text)
    *parents, last = field.split(".")
    inner = whole
    for name in parents:
        inner = inner[name]
    inner[last] = value
    return json.dumps(whole)


def _extend_prompt(inputs: Inputs, tokens: Sequence[int]) -> Inputs:
    """Return a prompt's inputs, followed by an answer's tokens."""
    count, more = inputs["input_ids"].shape[1], torch.tensor([list(tokens)], dtype=torch.long)
    behind = {"input_ids": more, "attention_mask": torch.ones_like(more)}
    return {
        name: torch.cat((each, behind.get(name, torch.zeros_like(more)).to(each.dtype)), 1)
        if each.shape == (1, count)
        else each
        for name, each in inputs.items()
    }


def _logits(reference: Reference, inputs: Inputs) -> Tensor:
    """Return the model's logits for the inputs, float32 [n, vocab]."""
    with torch.inference_mode():
        return reference(**inputs).logits[0].float()


def _in_bfloat16(inputs: Inputs) -> Inputs:
    """Return the inputs with float tensors in bfloat16."""
    return {name: each.bfloat16() if each.is_floating_point() else each for name, each in inputs.items()}


def check_log_probabilities(answer: Completion, logits: Tensor) -> None:
    """Compare a prompt's log-probabilities with a reference's logits, float32 [n, vocab]."""
    wanted, said = logits.log_softmax(-1), answer.prompt_logprobs
    assert said is not None and len(said) == len(wanted)
    for place, entries in enumerate(said[1:]):
        assert entries is not None
        # The reference's logits may lack media tokens. The answer's log-probability for a missing token must
        # be -inf.
        assert all(score == float("-inf") for token, score in entries if token >= wanted.shape[1])
        ids, scores = zip(*(entry for entry in entries if entry[0] < wanted.shape[1]), strict=True)
        gap = wanted[place, list(ids)] - torch.tensor(scores)
        assert gap.abs().max() < TOLERANCE, f"token {place + 1}"


class PluginContract:
    """The test suite. A subclass sets `plugin` and `refused`, and implements `make_checkpoint`. `refused`:
    unsupported values by dotted path in config.json. For a model with media, the subclass also overrides
    `chats`, `inputs` and `patches`.
    """

    plugin: ClassVar[ModelPlugin]
    refused: ClassVar[Mapping[str, object]]
    chats: Sequence[Chat] = CHATS
    # A subclass sets a larger number for a model in which a norm amplifies rounding.
    near_steps: int = NEAR_STEPS
    _made: ClassVar[Checkpoint]

    def make_checkpoint(self, folder: Path) -> Reference:
        """Write a tiny random checkpoint (`make_lively`) with tokenizer and chat template to `folder`. Return
        its transformers model in float32.
        """
        raise NotImplementedError

    def inputs(self, folder: Path, chat: Chat) -> Inputs:
        """Return transformers' inputs for a chat, with the generation prompt."""
        from transformers import AutoTokenizer  # Slow to import.

        tokenizer = AutoTokenizer.from_pretrained(folder)
        words = [{name: str(value) for name, value in message.items()} for message in chat]
        text = str(tokenizer.apply_chat_template(words, tokenize=False, add_generation_prompt=True))
        ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def patches(self, inputs: Inputs) -> list[np.ndarray]:
        """Return each media item's pixels in transformers' inputs, uint8 [patches, patch_width]."""
        return []

    def settings(self, name: str) -> dict[str, object]:
        """Return the engine settings for the check `name`. A subclass may change them."""
        return dict(SETTINGS[name])

    def reduced(self, made: Checkpoint) -> Reference:
        """Return the checkpoint's transformers model in bfloat16."""
        return made.reference.from_pretrained(made.folder, dtype=torch.bfloat16)

    @pytest.fixture
    def made(self, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
        if "_made" not in vars(type(self)):  # Once per class: pytest makes an instance for each test.
            type(self)._made = self._make(tmp_path_factory.mktemp("contract"))
        return self._made

    def _make(self, folder: Path) -> Checkpoint:
        reference = self.make_checkpoint(folder)
        inputs = [self.inputs(folder, chat) for chat in self.chats]
        tokens = []
        for each in inputs:
            out = reference.generate(
                **each, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            tokens.append(out[0, each["input_ids"].shape[1] :].tolist())
        assert len({token for answer in tokens for token in answer}) > NUM_NEW, (
            "make_checkpoint: too few tokens"
        )
        return Checkpoint(folder, reference, inputs, tokens)

    @pytest.fixture
    def processor(self, made: Checkpoint) -> Processor:
        return self.plugin.load_processor(made.folder)

    @pytest.fixture
    def copy(self, made: Checkpoint, tmp_path: Path) -> Path:
        shutil.copytree(made.folder, tmp_path / "model")
        return tmp_path / "model"

    def _load(self, folder: Path) -> None:
        self.plugin.load_model(folder, device="cpu", dtype="float32")

    def test_it_is_found_by_its_architecture(self, made: Checkpoint) -> None:
        assert plugin_for(made.folder) is self.plugin

    def test_prompts_are_transformers(self, made: Checkpoint, processor: Processor) -> None:
        # Compare each prompt's token ids, and each media item's pixels, with transformers' processor.
        for chat, inputs in zip(self.chats, made.inputs, strict=True):
            prepared, patches = processor.prepare(chat), self.patches(inputs)
            assert prepared.prompt_token_ids.tolist() == inputs["input_ids"][0].tolist()
            assert len(prepared.media) == len(patches)
            for mine, theirs in zip(prepared.media, patches, strict=True):
                assert mine.patches.dtype == np.uint8 and np.array_equal(mine.patches, theirs)

    def test_no_text_poses_as_structure(self, processor: Processor) -> None:
        # A message that spells out all special tokens adds no special token to the prompt.
        special = sorted(processor.tokenizer.special_ids)
        names = processor.tokenizer.decode(special, skip_special_tokens=False)
        plain, posing = (
            processor.prepare([{"role": "user", "content": text}]).prompt_token_ids for text in ("a", names)
        )
        assert np.isin(plain, special).sum() == np.isin(posing, special).sum() < len(posing)

    def test_the_processor_starts_without_torch(self, made: Checkpoint) -> None:
        done = subprocess.run([sys.executable, "-c", NO_TORCH, str(made.folder)], timeout=120)
        assert done.returncode == 0, "torch was imported"

    @pytest.mark.parametrize("name", ["beside others", "in chunks"])
    def test_log_probabilities_are_transformers(self, made: Checkpoint, name: str) -> None:
        """Compare the likeliest tokens' log-probabilities at each prompt position."""
        with self._engine(made, self.settings(name)) as engine:
            answers = engine.generate(self.chats, max_tokens=1, prompt_logprobs=MAX_LOGPROBS)
        for answer, inputs in zip(answers, made.inputs, strict=True):
            check_log_probabilities(answer, _logits(made.reference, inputs))

    @pytest.mark.parametrize("name", SETTINGS)
    def test_tokens_are_transformers(self, made: Checkpoint, tmp_path: Path, name: str) -> None:
        """Compare greedy tokens in float32, and verify the engine's log."""
        self._check_tokens(made, self.chats, name, tmp_path / "log", num_spare=2)

    def _check_tokens(
        self, made: Checkpoint, chats: Sequence[Chat], name: str, log: Path, num_spare: int
    ) -> None:
        """Compare each chat's greedy tokens at least twice, and verify the engine's log. `made`: contains
        transformers' inputs and tokens for `chats`. `name`: a key of SETTINGS. `num_spare`: for "preempted",
        the number of blocks in the pool beyond the blocks for two copies of the longest prompt. The spare
        blocks must be too few for the answers.
        """
        settings, tokens = self.settings(name), made.tokens
        num_new = len(tokens[0])
        if name == "preempted":
            lengths = [inputs["input_ids"].shape[1] for inputs in made.inputs]
            place = lengths.index(max(lengths))
            chats, tokens = [chats[place]] * 3, [tokens[place]] * 3
            num_blocks = 1 + num_spare + 2 * -(-max(lengths) // 4)
            settings |= {"max_model_len": max(lengths) + num_new, "num_blocks": num_blocks}
        with self._engine(made, settings, log) as engine:
            for number in range(MOST_ROUNDS):
                if number >= 2 and (name != "preempted" or engine.stats().num_preemptions):
                    break
                answers = engine.generate(chats, max_tokens=num_new, ignore_eos=True)
                assert [answer.token_ids for answer in answers] == tokens
            stats = engine.stats()
        assert (stats.num_cached_tokens > 0) is (name in ("from the cache", "drafted"))
        assert (stats.num_preemptions > 0) is (name == "preempted")
        assert (sum(counts.accepted for counts in stats.drafts.values()) > 0) is (name == "drafted")
        report = verify(log)
        assert report.ok and report.rederived and not report.unfinished

    def test_bfloat16_chooses_what_is_likeliest_but_for_near_ties(self, made: Checkpoint) -> None:
        """Check that each sampled token is nearly as likely as the likeliest token. The check passes if
        transformers' bfloat16 model or float32 model agrees. These two models may differ, because rounding
        can change a router's choice at an earlier token. Tokens with nearly tied experts are not checked.
        """
        with self._engine(made, {}, dtype="bfloat16") as engine:
            answers = self._greedy(engine)
        reduced = self.reduced(made)
        for answer, inputs in zip(answers, made.inputs, strict=True):
            whole = _extend_prompt(inputs, answer.token_ids[:-1])
            exact = _logits(made.reference, whole)[-NUM_NEW:]
            with routers(reduced) as said:
                logits = _logits(reduced, _in_bfloat16(whole))[-NUM_NEW:]
            steps = torch.minimum(*(steps_below(each, answer.token_ids) for each in (logits, exact)))
            near = near_experts(said).expand(-1 if said else NUM_NEW)[-NUM_NEW:]
            assert near.float().mean() <= MOST_NEAR_EXPERTS, "experts are near ties at most tokens"
            worst = steps.masked_fill(near, 0).max()
            print(f"chosen at most {worst:.1f} steps below the likeliest")
            assert worst <= self.near_steps, f"by {worst:.1f} steps, where no two experts are near a tie"

    def test_the_fingerprint_is_of_the_weights(self, made: Checkpoint, copy: Path) -> None:
        # A copied checkpoint has the same fingerprint, and a changed weight changes the fingerprint.
        before = self.plugin.fingerprint(made.folder)
        assert self.plugin.fingerprint(copy) == before
        self._edit_weights(copy, lambda weights: weights[min(weights)].view(-1)[:1].add_(1))
        assert self.plugin.fingerprint(copy) != before

    @pytest.mark.parametrize("what", ["missing", "surplus", "of another shape"])
    def test_a_wrong_tensor_is_refused_by_name(self, made: Checkpoint, copy: Path, what: str) -> None:
        stored = load_file(made.folder / "model.safetensors")
        name = max(name for name in stored if ".layers." in name and name.endswith("layernorm.weight"))

        def change(weights: dict[str, Tensor]) -> None:
            if what == "surplus":
                weights[f"{name}_too"] = torch.zeros(1)
                return
            weight = weights.pop(name)
            if what == "of another shape":
                weights[name] = torch.cat((weight, weight))

        self._edit_weights(copy, change)
        with pytest.raises(ModelError, match=name.rpartition(".layers.")[2].replace(".", r"\.")):
            self._load(copy)

    def test_what_a_config_cannot_be_is_refused_by_name(self, copy: Path) -> None:
        # For an invalid file, the error names config.json. For a value in `refused`, it names the field.
        path = copy / "config.json"
        whole = path.read_text()
        wrong = dict.fromkeys(("", "{", "[]", "{}"), r"config\.json")
        wrong |= {with_field(whole, *one): one[0].rpartition(".")[2] for one in self.refused.items()}
        for text, name in wrong.items():
            path.write_text(text)
            with pytest.raises(ModelError, match=name):
                self._load(copy)

    def _engine(
        self,
        made: Checkpoint,
        settings: Mapping[str, object],
        log: Path | None = None,
        dtype: str = "float32",
    ) -> Engine:
        sizes = {"num_blocks": 1025, "max_model_len": 512, "spec": "none", "num_threads": 1}
        config = EngineConfig.from_dict({**sizes, **settings})
        return Engine(made.folder, device="cpu", dtype=dtype, config=config, log=log)

    def _greedy(self, engine: Engine) -> list[Completion]:
        return engine.generate(self.chats, max_tokens=NUM_NEW, ignore_eos=True)

    @staticmethod
    def _edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
        path = folder / "model.safetensors"
        weights = load_file(path)
        change(weights)
        save_file(weights, path, metadata={"format": "pt"})
