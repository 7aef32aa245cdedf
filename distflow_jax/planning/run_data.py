"""The data of a run: its prompts and those of its evaluation, opened and checked."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json

from distflow_jax.batch import Prompt
from distflow_jax.cluster import processes
from distflow_jax.config.run_config import Config
from distflow_jax.dag.graph import Graph
from distflow_jax.data.column_choice import EVALUATION, INHERITED, ColumnsKey
from distflow_jax.data.dataset import check_truths, is_generated, open_dataset
from distflow_jax.data.encoded_rows import PromptEncoder
from distflow_jax.data.example import Dataset
from distflow_jax.data.loader import Loader, SamplerShare
from distflow_jax.data.row_share import RowShare
from distflow_jax.data.step_columns import ANSWERS
from distflow_jax.data.unpaired_rows import UnpairedRows
from distflow_jax.images.placing import SeeingTokenizer
from distflow_jax.models.vision.image_layout import image_layout
from distflow_jax.models.weights.source import ModelSource
from distflow_jax.parsing.paths import cache_folder
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.sizes import Sizes
from distflow_jax.rewards.registry import NEED_TRUTH
from distflow_jax.stages.evaluate import FIRST_COUNTER


def open_loader(
    config: Config,
    graph: Graph,
    encoder: PromptEncoder,
    *,
    share: SamplerShare,
    observed_staleness: int,
    dataset: Dataset | None = None,
) -> Loader:
    """The loader of a run's training data, all rows checked; of `dataset` where it is given.

    Raises ValueError or FileNotFoundError.
    """
    if config.data.train_on != "answer" and graph.data != "demonstrations":
        raise ValueError(
            f"data.train_on={config.data.train_on} is for demonstrations, but dag {config.dag!r} "
            f"trains on {graph.data}: use data.train_on=answer"
        )
    unpaired = graph.data == "unpaired"
    if unpaired and config.data.prompts_per_step < 2:
        raise ValueError(
            f"data.prompts_per_step={config.data.prompts_per_step} is too few for dag "
            f"{config.dag!r}, which compares the answers of a step's rows with those of other "
            "rows: use at least 2"
        )
    reward = config.reward.function
    dataset = dataset or open_dataset(
        config.data.train,
        system_prompt=config.data.system_prompt,
        prompt_suffix=config.data.prompt_suffix,
        columns=config.data.columns,
        image_root=config.data.image_root,
        share=_row_share(),
    )
    if reward in NEED_TRUTH and calls_rewards(graph):
        check_truths(dataset, reward)
    dataset = UnpairedRows(dataset) if unpaired else dataset
    loader = Loader(
        dataset,
        encoder,
        config.data,
        seed=config.seed,
        share=share,
        answers=ANSWERS[graph.data].of_row,
        max_answer=config.rollout.max_response_length,
        observed_staleness=observed_staleness,
    )
    if config.data.epochs and loader.num_steps < config.training.steps:
        raise ValueError(
            f"data.epochs={config.data.epochs} gives {loader.num_steps} steps of "
            f"{config.data.prompts_per_step} prompts, fewer than training.steps="
            f"{config.training.steps}; lower training.steps, or raise data.epochs (0: no limit)"
        )
    return loader


def calls_rewards(graph: Graph) -> bool:
    """Whether a node of the graph calls the reward function."""
    return any(n.role == "REWARD" and n.type == "COMPUTE" and n.fn is None for n in graph.nodes)


def prompt_encoder(source: ModelSource, image_tokens: int) -> PromptEncoder:
    """The tokenizer of a model, beside the layout of its images where it sees them.

    `image_tokens` is `data.image_tokens`. Raises ValueError if no image can have so few features.
    """
    vision = source.config.vision
    if vision is None:
        return source.tokenizer
    layout = image_layout(vision, source.tokenizer, image_tokens)
    return SeeingTokenizer(source.tokenizer, layout)


def _row_share() -> RowShare:
    """The rows that this process checks; what is found is kept for the code and packages here."""
    packages = {name: importlib.metadata.version(name) for name in ("tokenizers", "jinja2")}
    code = json.dumps([processes.code_table(), packages], sort_keys=True)
    kept = None
    with contextlib.suppress(ValueError):  # a user without a home, as in containers
        kept = cache_folder() / "rows"
    return RowShare(
        processes.process_index(),
        processes.process_count(),
        processes.all_gather_json,
        processes.all_gather_ragged,
        kept=kept,
        code=hashlib.blake2b(code.encode(), digest_size=16).hexdigest(),
    )


def sampler_share(sizes: Sizes, machine: Machine, *, in_turn: bool = False) -> SamplerShare:
    """The sampler that this process belongs to; `in_turn`: as of SamplerShare."""
    index, hosts = processes.process_index(), sizes.sampler_hosts
    return SamplerShare(index // hosts, machine.processes // hosts, hosts, in_turn)


def eval_columns(config: Config) -> tuple[dict[str, str], ColumnsKey]:
    """The columns of the evaluation set, its own or those of the training data, and their key."""
    if config.eval.columns is not None:
        return config.eval.columns, EVALUATION
    return {} if is_generated(config.eval.dataset) else config.data.columns, INHERITED


def load_eval_prompts(config: Config, encoder: PromptEncoder, share: SamplerShare) -> list[Prompt]:
    """This sampler's `share` of the evaluation prompts; empty without an evaluation set."""
    if not config.eval.dataset:
        return []
    data = dataclasses.replace(config.data, shuffle=False, epochs=1, prompts_per_step=1)
    columns, columns_key = eval_columns(config)
    dataset = open_dataset(
        config.eval.dataset,
        system_prompt=data.system_prompt,
        prompt_suffix=data.prompt_suffix,
        columns=columns,
        columns_key=columns_key,
        image_root=data.image_root,
        share=_row_share(),
    )
    if config.reward.function in NEED_TRUTH:
        check_truths(dataset, config.reward.function)
    loader = Loader(dataset, encoder, data, seed=config.seed)
    count = min(config.eval.num_prompts or len(loader), len(loader))
    if count < (least := share.count * share.hosts):
        raise ValueError(
            f"{config.eval.dataset!r} gives {count} evaluation prompts for {least} "
            f"processes; set config.eval.num_prompts to at least {least}"
        )
    first = (share.index - FIRST_COUNTER) % share.count  # counters of an evaluation tell whose
    return [loader.prompt(counter) for counter in range(first, count, share.count)]
