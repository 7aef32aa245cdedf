"""The metrics of a run: the meaning of each name, and of a bad value.

One table for the reference in docs/reference/metrics.md, which is generated from it, and for the
report's explanations. In a name {a,b} stands for a or b; {word} stands for a name that the run
gives, such as a node's id.
"""

import dataclasses
import functools
import re

_PART = re.compile(r"\{([^{}]*)\}")


@dataclasses.dataclass(frozen=True)
class Metric:
    """Metrics that share a meaning. `bad` describes a bad value and its likely cause; "": none."""

    name: str
    meaning: str
    bad: str = ""

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """The expression that matches every name this entry stands for, and no other."""
        pieces = _PART.split(self.name)  # text and the inside of braces by turns
        for i in range(0, len(pieces), 2):
            pieces[i] = re.escape(pieces[i])
        for i in range(1, len(pieces), 2):
            choices = pieces[i].split(",")
            pieces[i] = f"(?:{'|'.join(map(re.escape, choices))})" if choices[1:] else ".+"
        return re.compile("".join(pieces), re.DOTALL)


_NOT_FINITE = "NaN or infinity: lower training.optimizer.lr"

METRICS: dict[str, tuple[Metric, ...]] = {
    "Scores, rewards, advantages": (
        Metric(
            "critic/score/{mean,max,min}",
            "score of a response: reward function, environment and length penalty; no KL",
            "flat: max equals min in every group (no signal), or the reward never finds an answer",
        ),
        Metric(
            "critic/rewards/{mean,max,min}",
            "score less the KL penalty of algorithm.kl_in_reward, of responses with trained tokens",
            "far below the score: the KL penalty dominates; lower algorithm.kl_coef",
        ),
        Metric(
            "critic/advantages/{mean,max,min}",
            "advantage of response tokens",
            "all 0: every group has equal scores, nothing is learned from this step",
        ),
        Metric(
            "critic/returns/{mean,max,min}",
            "return of response tokens: the critic's target; without a critic the rewards to come",
        ),
        Metric(
            "critic/values/{mean,max,min}",
            "value that the critic predicts for response tokens",
            "far outside the range of the returns: critic.optimizer.lr is too high",
        ),
        Metric(
            "critic/vf_explained_var",
            "share of the returns' variance that the values explain; 1 is perfect",
            "below 0: worse than a constant; raise critic.warmup",
        ),
    ),
    "Policy update": (
        Metric("actor/pg_loss", "policy loss, averaged as algorithm.aggregation says"),
        Metric(
            "actor/budget_share",
            "with aggregation fixed-budget: weight of the optimizer step's tokens over "
            "algorithm.token_budget; 1: the budget is full",
            "below 1: responses have fewer tokens than the budget; lower algorithm.token_budget",
        ),
        Metric(
            "actor/kl_loss",
            "KL to the reference model by algorithm.kl_estimator, with algorithm.kl_coef above 0",
            "grows without end: the policy leaves the reference; raise algorithm.kl_coef",
        ),
        Metric(
            "actor/loss",
            "the minimised sum: policy loss, weighted KL, entropy and balance loss; or the "
            "preference or SFT loss",
            _NOT_FINITE,
        ),
        Metric(
            "actor/nll",
            "SFT: negative log-likelihood in nats per response token",
            "rises: training.optimizer.lr is too high",
        ),
        Metric(
            "actor/entropy",
            "nats per response token at the sampling temperature",
            "falls to 0 early: responses become equal; raise algorithm.clip_high, or add KL. Rises "
            "without end: training.optimizer.lr is too high",
        ),
        Metric(
            "actor/pg_clipfrac",
            "share of response tokens whose ratio is clipped, or that dppo_tv and dppo_kl find too "
            "far, or that clip_cov leaves out",
            "above 0.2: batches are too stale; use fewer training.mini_batches and training.epochs",
        ),
        Metric(
            "actor/pg_clipfrac_lower",
            "share of response tokens at the dual clip: bad tokens that became much likelier",
            "above 0.01: the policy moves too far in one step",
        ),
        Metric(
            "actor/ppo_kl",
            "mean of old - new log-prob per token within a step; 0 with one update per batch",
            "above 0.1: training.optimizer.lr or the number of updates per batch is too high",
        ),
        Metric(
            "actor/reward_kl_penalty",
            "with algorithm.kl_in_reward: KL to the reference, mean over responses of token means",
            "grows without end: raise algorithm.kl_coef",
        ),
        Metric("actor/reward_kl_penalty_coeff", "its weight, which algorithm.kl_target steers"),
    ),
    "All updates": (
        Metric(
            "{actor,critic,reward_model}/grad_norm",
            "global norm of the gradient before clipping",
            "sudden peaks: unstable; lower training.optimizer.lr. 0: no signal in the batch",
        ),
        Metric("{actor,critic,reward_model}/lr", "learning rate of the update"),
        Metric(
            "{actor,critic,reward_model}/balance_loss",
            "mixture of experts: sum of f_i P_i, mean over sequences and layers; 1 is even, "
            "experts / active experts is the most",
            "far above 1: few experts do the work; raise training.balance_coef",
        ),
        Metric(
            "{actor,critic,reward_model}/expert_share_max",
            "share of all tokens' choices that the busiest expert of any layer gets; even: "
            "1 / experts",
            "many times 1 / experts: raise training.balance_coef",
        ),
        Metric(
            "actor/router_mismatch",
            "with training.router_replay: share of (token, layer) pairs for which the policy's own "
            "router would have chosen other experts than the sampler",
            "above 0.1: sampler and trainer differ much; check rollout.weights_dtype",
        ),
        Metric(
            "training/nonfinite",
            "updates skipped because loss or gradient was not finite",
            "above 0: see samples/nonfinite-STEP.jsonl; lower training.optimizer.lr",
        ),
    ),
    "Critic update": (
        Metric("critic/{vf_loss,loss}", "value loss; with a mixture also its balance loss"),
        Metric(
            "critic/vf_clipfrac",
            "share of tokens whose value loss is clipped",
            "above 0.2: critic.optimizer.lr is too high, or critic.loss.clip too small",
        ),
        Metric("critic/vpred_mean", "mean value after the critic's forward pass of the update"),
    ),
    "Preferences and reward model": (
        Metric(
            "rewards/{chosen,rejected}",
            "implicit reward of DPO: beta x (log-prob - reference log-prob), mean over pairs",
            "both fall far below 0: the policy forgets; raise preference.beta or lower the lr",
        ),
        Metric(
            "rewards/margins",
            "chosen less rejected implicit reward, mean over pairs",
            "does not rise above 0: nothing is learned",
        ),
        Metric(
            "rewards/accuracies",
            "share of pairs whose chosen response has the higher implicit reward",
            "stays at 0.5: nothing is learned",
        ),
        Metric(
            "logps/{chosen,rejected}",
            "summed log-prob of a response, mean over pairs",
            "chosen falls steadily: the policy moves away from the good answers too",
        ),
        Metric(
            "preference/unpaired_fraction",
            "share of responses without a partner in their row",
            "above 0: pairs exceed training.row_tokens; raise that",
        ),
        Metric("reward_model/loss", "Bradley-Terry loss, mean over pairs", _NOT_FINITE),
        Metric("reward_model/{score_chosen,score_rejected}", "score of the response, over pairs"),
        Metric("reward_model/score_margin", "chosen less rejected score, mean over pairs"),
        Metric(
            "reward_model/accuracy",
            "share of pairs whose chosen response scores higher",
            "stays at 0.5: nothing is learned",
        ),
    ),
    "Sampler against trainer": (
        Metric(
            "training/rollout_probs_diff_{mean,max}",
            "gap between sampler's and trainer's probability of the sampled tokens",
            "mean above 0.01: the sampler does not draw from the trained policy; set "
            "algorithm.correction, or use wider dtypes",
        ),
        Metric(
            "rollout_corr/log_ratio_abs_{mean,max}",
            "the same gap in log-probs",
            "mean above 0.1: see training/rollout_probs_diff",
        ),
        Metric(
            "rollout_corr/rollout_is_{mean,max}",
            "weight of algorithm.correction",
            "mean far from 1: sampler and policy are different distributions",
        ),
        Metric(
            "rollout_corr/rollout_is_changed_fraction",
            "share of tokens whose ratio is outside the correction's bounds",
            "above 0.05: most of the correction is a cut",
        ),
        Metric(
            "rollout_corr/rollout_is_batch_norm_factor",
            "mean weight by which algorithm.correction_batch_normalize divides",
            "far from 1: see rollout_corr/rollout_is_mean",
        ),
        Metric(
            "rollout_corr/kept_weight_max",
            "largest weight of a token after correction and rejection",
            "0: the whole batch was rejected; widen the bounds of correction and rejection",
        ),
        Metric(
            "rollout_corr/{training,rollout}_{ppl,log_ppl}",
            "perplexity of the responses under trainer and sampler, mean over responses; its "
            "logarithm",
            "training_ppl far above rollout_ppl: the trainer finds the samples unlikely",
        ),
        Metric(
            "rollout_corr/log_ppl_{diff,abs_diff,diff_max}",
            "log(training_ppl / rollout_ppl) of a response: mean, mean absolute value, largest",
            "diff far from 0: sampler and trainer differ in one direction",
        ),
        Metric(
            "rollout_corr/ppl_ratio",
            "training_ppl / rollout_ppl, mean over responses",
            "far from 1: see rollout_corr/log_ppl_diff",
        ),
        Metric(
            "rollout_corr/{kl,k3_kl,reverse_kl}",
            "nats per token: KL(sampler, trainer) as mean log-ratio and by k3, and KL(trainer, "
            "sampler)",
            "k3_kl above 0.01: see training/rollout_probs_diff",
        ),
        Metric(
            "rollout_corr/{chi2_token,chi2_seq}",
            "mean squared ratio of trainer to sampler - 1: the variance of the weights of tokens, "
            "and of whole responses",
            "chi2_seq far above 1: sequence weights are noise; correct tokens, or reject",
        ),
        Metric(
            "rollout_corr/rollout_rs_{masked_fraction,seq_masked_fraction}",
            "share of tokens, and of responses, that algorithm.rejection leaves out",
            "near 1: nothing is trained on, see rollout_corr/kept_weight_max; widen "
            "algorithm.rejection_low and rejection_high",
        ),
    ),
    "Responses and prompts": (
        Metric(
            "response_length/{mean,max,min}",
            "tokens of a response, observations of an environment included",
            "mean rises to the limit while the score does not: responses ramble; use "
            "reward.overlong_buffer",
        ),
        Metric(
            "response_length/clip_ratio",
            "share of responses cut by a limit",
            "above 0.1: raise rollout.max_response_length",
        ),
        Metric("prompt_length/{mean,max,min}", "tokens of a prompt, those of its images included"),
        Metric("data/images", "images in the step's prompts; of models that see images"),
        Metric(
            "data/images_shrunk",
            "of these, images that data.image_tokens made smaller than their family would",
            "most of data/images, and answers need detail: raise data.image_tokens",
        ),
        Metric("global_seqlen/{mean,max,min}", "prompt + response tokens of a sequence"),
        Metric(
            "global_seqlen/balanced_{min,max}",
            "tokens in the packed rows of the lightest and of the heaviest data rank",
            "max far above min: few long sequences; raise data.prompts_per_step",
        ),
    ),
    "Steps and rounds": (
        Metric("training/global_step", "number of the step, from 1"),
        Metric("training/epoch", "passes through the data so far"),
        Metric("training/sampling_rounds", "with a region: rounds of the step"),
        Metric("training/groups_{sampled,kept}", "groups sampled in them, and worth training on"),
        Metric(
            "training/groups_missing",
            "groups that the step lacks after the region's max_rounds",
            "above 0 for long: prompts are too easy or too hard for this policy",
        ),
    ),
    "Asynchronous steps": (
        Metric(
            "training/partial_batches", "with stream.partial_batches: partial batches of the step"
        ),
        Metric("training/groups", "with stream.round_tokens: groups of the step"),
        Metric(
            "training/rollout_tokens",
            "with stream.round_tokens: tokens that were sampled in the step's rollout",
        ),
        Metric(
            "training/rollout_tokens_beyond",
            "those of them beyond stream.round_tokens",
            "much of the rollout for long: it waits for groups that have to be trained; raise "
            "stream.max_staleness or stream.round_tokens",
        ),
        Metric(
            "training/off_policy/trajectory_staleness/{mean,max,min}",
            "training steps since the weights that sampled a response's oldest token",
            "mean near stream.max_staleness: samplers are far ahead; give them fewer devices, or "
            "lower it",
        ),
        Metric("training/off_policy/age_share/{age}", "share of tokens of this age in steps"),
        Metric(
            "training/off_policy/divergence",
            "with stream.divergence: D, nats per token (k3) between the weights before the step "
            "and the oldest that samplers would go on with",
            "below stream.divergence in most steps: weights move when a sampler has nothing to do",
        ),
        Metric(
            "perf/tokens/{sampled,trained,filtered,lost,under_way}",
            "tokens since the run began, over all processes and restarts: sampled is the sum of "
            "all others",
            "lost rises with each restart: save more often, or give the launcher more "
            "--grace_seconds",
        ),
        Metric(
            "perf/workers/{alive,ended,expired,second}",
            "with stream.workers, at the first trainer: workers at work, neither silent nor "
            "stalled; since the trainers started: workers that were ended for their results, "
            "leases that ended without a result, and second results of a response",
            "expired rises while workers live: raise stream.lease_seconds; ended is above 0: the "
            "log says which and why",
        ),
        Metric(
            "training/off_policy/in_flight_share/{steps}",
            "share of tokens after which weights were updated so many times before their response "
            "ended; 0: the response has one version",
        ),
        Metric(
            "training/off_policy/waiting_share/{steps}",
            "share of tokens whose response was trained on so many steps after the weights that "
            "sampled its last token",
            "most near stream.max_staleness: samplers are ahead and wait; give them fewer devices",
        ),
        Metric(
            "rollout_corr/{kl,k3_kl}/{age}",
            "rollout_corr/kl and k3_kl over the tokens of this age",
            "rises steeply with the age: lower stream.max_staleness, or the learning rate",
        ),
        Metric(
            "rollout_corr/rollout_is_eff_sample_size",
            "with stream.max_staleness and algorithm.correction: share of the tokens that would "
            "weigh as much if all weights were equal, mean(weight)^2 / mean(weight^2)",
            "below 0.5: few tokens carry the gradient; lower stream.max_staleness or the bounds",
        ),
    ),
    "Rewards": (
        Metric(
            "reward/errors",
            "responses whose reward function raised an exception; they get reward.on_error",
            "above 0: the log has the traceback of the first one",
        ),
        Metric(
            "reward/timeouts",
            "responses whose reward function missed reward.timeout_seconds",
            "above 0: raise reward.timeout_seconds or reward.num_workers, or speed up the function",
        ),
        Metric(
            "reward/no_answer",
            "responses in which the built-in reward function finds no answer",
            "most of them: say in data.prompt_suffix how to give the answer",
        ),
        Metric(
            "reward/not_scored",
            "responses for which the reward function returned None; they leave their groups",
        ),
        Metric(
            "reward/not_finite",
            "numbers beside a score that were NaN or infinite, and are left out of their mean",
        ),
        Metric(
            "reward/overlong_penalty",
            "length penalty of reward.overlong_buffer, mean over responses; at most 0",
            "falls: responses grow towards the limit",
        ),
        Metric("reward/environment", "reward of the environment, mean over responses"),
        Metric(
            "reward/{name}",
            "mean of a number that a reward function returns beside its score, or of a score that "
            "weighted_sum adds",
        ),
    ),
    "Environments": (
        Metric("environment/turns/{mean,max}", "turns of the model in a response"),
        Metric("environment/observation_tokens", "observed tokens, mean over responses"),
        Metric(
            "environment/ended/{done,max_turns,turn_length,response_length}",
            "share of responses that ended for this reason",
            "done is low: raise the limit that ends the others",
        ),
        Metric(
            "environment/infra/{raised,timed_out,diverged}",
            "failed calls of environments, by cause (docs/environments.md); they are made again",
            "above 0: the log has the first of each kind, and how often it came",
        ),
        Metric(
            "environment/infra/redrawn",
            "responses that were drawn anew, as all tries of a call failed",
            "many: responses that ask more of the environment are lost more often",
        ),
        Metric(
            "environment/infra/unscored",
            "responses that have left their group, as they could not be drawn anew either",
            "above 0: the environment fails for some rows of the data",
        ),
        Metric("environment/{name}", "mean over responses of a number that an environment logs"),
    ),
    "Evaluation": (
        Metric(
            "val-core/{data source}/reward/mean@{N}",
            "mean score of N responses per prompt: accuracy where scores are 0 or 1",
            "falls while critic/score/mean rises: the policy exploits the reward, or overfits",
        ),
        Metric("val-core/{data source}/reward/best@{N}/mean", "mean of the best of N scores"),
        Metric("val-core/{data source}/reward/maj@{N}/mean", "mean score of the majority's answer"),
        Metric("val-aux/{data source}/num_prompts", "prompts of the evaluation"),
        Metric(
            "val-aux/{data source}/reward/stderr@{N}",
            "standard error of mean@N over prompts",
            "as large as the change that you want to see: raise eval.num_prompts",
        ),
    ),
    "Seconds": (
        Metric("timing_s/step", "whole step, evaluation included"),
        Metric("timing_s/gen", "sampling"),
        Metric("timing_s/{reward,adv,old_log_prob,ref,values}", "that node of the graph"),
        Metric("timing_s/score", "reward calls, also those that run while others are decoded"),
        Metric("timing_s/{update_actor,update_critic}", "that update"),
        Metric("timing_s/update_weights", "weight sync from trainer to sampler"),
        Metric(
            "timing_s/wait_for_samples",
            "with stream.max_staleness: until all processes have their groups of the step; on "
            "devices of the trainer's, sampling",
            "most of the step, with samplers beside it: give them more devices, or raise "
            "max_staleness",
        ),
        Metric("timing_s/{testing,save_checkpoint}", "evaluation; start of a checkpoint"),
        Metric(
            "timing_s/evaluation",
            "evaluation by samplers beside the training (stream.weight_update=boundary); "
            "timing_s/testing is then what the training waits for it",
        ),
        Metric("timing_s/{compile_programs,compile_sampler}", "compilation, before step 1"),
        Metric("timing_s/{statistics,write_profile}", "metrics of the step; writing of a profile"),
        Metric(
            "timing_s/read_prompts",
            "waiting for the loader",
            "above 0.1: the data are slow; see coordinator.double_buffer",
        ),
        Metric(
            "timing_s/take_weights",
            "with samplers on devices of their own: arrival of weights there, in the sampler's "
            "thread; see perf/weight_update",
        ),
        Metric("timing_s/reshard", "packing and moving the batch"),
        Metric(
            "timing_s/host_communication",
            "collectives among hosts, waiting included",
            "large: processes wait for each other; see perf/idle and stragglers.jsonl",
        ),
        Metric(
            "timing_s/{node}",
            "a node with a function of its own, by its id. Nodes in one program have one time, "
            "old_log_prob.ref",
        ),
        Metric(
            "timing_per_token_ms/{gen,update_actor}",
            "milliseconds per response token; per prompt + response token",
        ),
    ),
    "Speed, memory, processes": (
        Metric("perf/throughput", "prompt + response tokens per second and device"),
        Metric("perf/time_per_step", "seconds of the step without its evaluation"),
        Metric("perf/total_num_tokens", "prompt + response tokens of the step"),
        Metric("perf/generate_calls", "decode calls of the step"),
        Metric(
            "perf/slots_busy_share",
            "with an environment: share of the time of decode slots in which they had a response, "
            "while any was under way",
            "below 0.5: responses wait for their environments; raise rollout.max_trajectories, and "
            "data.prompts_per_step or stream.max_staleness if no more may be under way",
        ),
        Metric(
            "perf/trajectories/{tool_seconds,slot_seconds}",
            "with an environment, mean over responses: seconds in which they waited for its "
            "answers, and for a decode slot",
            "slot_seconds is the larger: rollout.num_slots is what delays them",
        ),
        Metric(
            "perf/trajectories/reread_tokens",
            "with an environment: tokens of prompts and responses that were prefilled again, after "
            "a long answer or an image, or because others had needed their pages",
            "near perf/total_num_tokens: raise rollout.cache_tokens, or lower "
            "rollout.max_trajectories",
        ),
        Metric(
            "perf/weight_update/{leave,arrive}",
            "with stream.max_staleness, mean over processes: seconds in which the training sends "
            "weights, and in which a sampler takes weights in place of decoding",
        ),
        Metric(
            "perf/weight_update/{exposed,hidden}",
            "those of them that delay the training, which sends weights or waits for samples; "
            "those beside a training at work",
            "exposed is a large share of the step: give samplers devices of their own, or raise "
            "stream.max_staleness",
        ),
        Metric(
            "perf/weight_update/skipped",
            "with stream.divergence: 1 if the step's weights were not published at its end, else 0",
        ),
        Metric(
            "perf/weight_update/bytes",
            "bytes of weights that came to a sampler or its host since the "
            "groups of the step before were taken, mean over processes",
        ),
        Metric(
            "perf/mfu/actor",
            "model FLOPs utilisation of the actor's update, on devices whose peak is known",
            "below 0.2: rows are short or empty; see docs/metrics.md",
        ),
        Metric(
            "perf/compilations",
            "programs compiled or fetched during the step",
            "above 0 after step 1: shapes changed; the log names the programs",
        ),
        Metric("perf/compilations_fetched", "of them those from the compilation cache"),
        Metric(
            "perf/max_memory_allocated_gb",
            "peak GiB of the device where it reports one, else of the process",
            "near the device's memory: set training.remat or training.offload, see memory.json",
        ),
        Metric("perf/memory_live_gb", "GiB of arrays on the fullest device after step 1"),
        Metric(
            "perf/{memory_live_planned_gb,memory_planned_gb}",
            "GiB planned of them, and the most that a node was planned to need (memory.json)",
        ),
        Metric(
            "perf/pipeline_bubble",
            "with mesh.pipeline above 1: share of a pipeline rank's time spent waiting",
            "above 0.3: raise training.pipeline_microbatches or training.pipeline_repeats",
        ),
        Metric(
            "perf/idle/{node}",
            "mean over processes of the share of the slowest one's time that they did not need",
            "above 0.2: one process is slow; stragglers.jsonl names it",
        ),
        Metric(
            "perf/{cpu_seconds,coordination_cpu_seconds}",
            "CPU seconds of a process, all threads; of that in collectives among hosts and packing",
        ),
        Metric("perf/bytes_received", "payload from other processes, of the one that got the most"),
        Metric(
            "perf/images_encoded",
            "of models that see images: images in the trainer's rows, one per row and prompt, and "
            "those of turns",
        ),
        Metric(
            "perf/image_bytes_moved",
            "of models that see images: bytes of prompts with images, and of images of turns, from "
            "other processes",
        ),
        Metric(
            "rollout/images_encoded",
            "of models that see images: images that samplers encoded, one per prompt and version",
        ),
        Metric(
            "rollout/prefix/{hits,tokens}",
            "with rollout.prefix_tokens: prompts that reuse a shared prefix, and tokens not "
            "prefilled again",
            "hits 0: no prompts share that many first tokens",
        ),
        Metric(
            "rollout/speculation/accepted_share",
            "with rollout.speculative_tokens: share of guessed tokens that were drawn",
            "below 0.2: guesses cost more than they save; set it to 0",
        ),
    ),
}


def find_metric(name: str) -> Metric | None:
    """The entry of a metric's name; None for a name that only a user's own node writes.

    Where a graph has several nodes of a kind, "NODE/" stands before the names of each; such a name
    has the entry of its rest. Of several entries that match, the first in the table is taken, and
    one without a free {word} before one with it.
    """
    entries = [metric for section in METRICS.values() for metric in section]
    fixed = [metric for metric in entries if not _free(metric.name)]
    free = [metric for metric in entries if _free(metric.name)]
    rest = name.partition("/")[2]
    for metrics, candidate in ((fixed, name), (fixed, rest), (free, name), (free, rest)):
        for metric in metrics:
            if candidate and metric.pattern.fullmatch(candidate):
                return metric
    return None


def _free(name: str) -> list[str]:
    """The free {word}s of a name."""
    return [part for part in _PART.findall(name) if "," not in part]
